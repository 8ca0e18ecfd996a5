"""What `benchmarks.compiled_kernels` runs in processes of their own.

    python -m benchmarks.compiled_worker compile H100 calls.pt results.json
    python -m benchmarks.compiled_worker interpret H100 calls.pt results.json   # TRITON_INTERPRET=1
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compiled_card import CARDS, Card, load_guard, playing
from benchmarks.compiled_table import resources


import os
TEST=os.environ.get('TEST')
def main() -> None:
    role, card, calls, out = sys.argv[1:]
    load_guard()  # before torch
    rows = {"compile": compiled, "interpret": interpreted}[role](CARDS[card], calls)
    Path(out).write_text(json.dumps(rows, indent=1) + "\n")


def compiled(card: Card, path: str) -> list[dict[str, Any]]:
    """The kernels of every call and every compiled block, in machine code."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.compiled_calls import LARGE, Call, configured
    from parallel3d.device.fused import fused

    launched: list[Any] = []

    def run(kernel: Any, *args: Any, **how: Any) -> None:
        launched.append(kernel)

    rows = []
    calls = [Call(*call) for call in torch.load(path, weights_only=False)]
    with playing(card, run) as written:

        def case(name: str, title: str, elements: int, run_case: Callable[[], None]) -> None:
            torch._dynamo.reset()
            launched.clear(), written.clear()
            row: dict[str, Any] = {
                "card": card.name, "case": title, "function": name, "elements": elements
            }  # fmt: skip
            try:
                with FakeTensorMode():
                    run_case()
                row["kernels"] = [figures(kernel, launched.count(kernel)) for kernel in written]
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            print(card.name, title, name, row.get("error", ""), flush=True)
            rows.append(row)

        for call in calls:
            if call.is_compiled and not TEST:
                case(call.name, call.case, largest(call), lambda call=call: run_fused(call, fused))
        for title, words in LARGE.items():
            config = configured(words)
            elements = config.micro_batch_size * config.model.seq_length * config.model.hidden_size
            case("block", title, elements, lambda config=config: run_blocks(config))
    return rows


def run_fused(call: Any, fused: Any) -> None:
    """Runs the function as `fused` does, on fake tensors of a GPU. Raises if it is not compiled."""
    import torch

    given = [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda")
        if isinstance(a, torch.Tensor)
        else a
        for a in call.arguments
    ]
    function = fused(call.function.function, least=call.function.least)
    import parallel3d.device.fused as ff
    ff._first_line = lambda e: (traceback.print_exception(e), str(e))[1]
    function(*given)
    if function.compiled is None or function.compiled is function.function:
        raise RuntimeError("runs as separate operations (see the warning)")


def run_blocks(config: Config) -> None:
    """Forward and backward of a stage's blocks under `compile=true`."""
    import torch

    from parallel3d.comm.group import SINGLE
    from parallel3d.models.context import BuildContext
    from parallel3d.models.transformer import Stage, compile_blocks
    from parallel3d.parameters.pieces import Initializer

    class Empty(Initializer):
        def values(self, spec):
            return torch.empty(spec.shape, dtype=torch.bfloat16, device=self.device)

    device, model = torch.device("cuda", 0), config.model
    context = BuildContext.of_run(config, Empty(config.seed, torch.float32, device), SINGLE)
    stage = Stage(model, range(model.num_layers), False, False, context)
    compile_blocks([stage], keeps_operands=False)
    size = (config.micro_batch_size, model.seq_length, model.hidden_size)
    x = torch.empty(size, dtype=torch.bfloat16, device=device, requires_grad=True)
    samples = torch.empty(size[0], dtype=torch.int64, device=device) if model.dropout else None
    y = stage.run_blocks(list(stage.layers.values()), x, stage.rotary, samples, None)
    y.backward(torch.empty_like(y))


def largest(call: Any) -> int:
    import torch

    return max(a.numel() for a in call.arguments if isinstance(a, torch.Tensor))


def figures(kernel: Any, launches: int) -> dict[str, Any]:
    """Compiles every candidate configuration of a kernel and reads its machine code."""
    import torch._inductor.runtime.triton_heuristics  # noqa: F401

    found: dict[str, Any] = {
        "kernel": kernel.fn.__name__,
        "launches": launches,
        "bytes": round(1e9 * kernel.inductor_meta["kernel_num_gb"]),
        "configurations": [],
    }
    for configuration in kernel.configs:
        binary = kernel._precompile_config(configuration).kernel
        shown = " ".join(f"{k}={v}" for k, v in configuration.kwargs.items())
        code = resources(dump(binary.asm["cubin"]))
        found["configurations"].append(
            {"blocks": shown, "warps": configuration.num_warps, "stages": configuration.num_stages}
            | code | {"shared": binary.metadata.shared}
        )  # fmt: skip
    return found


def dump(cubin: bytes) -> str:
    """What `cuobjdump` of Triton's wheel says that the machine code takes."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def interpreted(card: Card, path: str) -> list[dict[str, Any]]:
    raise NotImplementedError


if __name__ == "__main__":
    main()
