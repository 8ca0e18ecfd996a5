"""Compiles or interprets kernels for `benchmarks.compiled.kernels`, in a process of its own.

python -m benchmarks.compiled.worker compile H100 calls.pt results.json
TRITON_INTERPRET=1 python -m benchmarks.compiled.worker interpret H100 calls.pt results.json
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.compiled.card import CARDS, Card, interpreting, load_guard, playing
from benchmarks.compiled.table import resources

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.compiled.calls import Call
    from parallel3d.run_config import Config

# Tolerances relative to the largest magnitude in a result, by the bits of its dtype: one rounding,
# and a few of fp32.
TOLERANCES = {"torch.bfloat16": 2.0**-8, "torch.float32": 2.0**-18}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("compile", "interpret"))
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("calls", help="a file of `benchmarks.compiled.calls`")
    parser.add_argument("out", type=Path, help="the file to write")
    given = parser.parse_args()
    load_guard()  # must come before torch is imported
    from benchmarks.compiled.calls import load

    play = {"compile": compiled, "interpret": interpreted}[given.role]
    rows = play(CARDS[given.card], load(given.calls))
    given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def compiled(card: Card, calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Compiles the kernels of every call and every compiled block to machine code."""
    from benchmarks.compiled.calls import LARGE, configured

    launched: list[Any] = []

    def run(kernel: Any, *arguments: Any, **how: Any) -> None:
        launched.append(kernel)

    def rows_of(case: str, elements: int, run_case: Callable[[], list[tuple[str, int]]]) -> None:
        launched.clear()
        shared = {"card": card.name, "case": case, "elements": elements}
        parts, error = found(run_case)
        begin = 0
        for name, end in parts:
            kernels = launched[begin:end]
            begin = end
            counts = {kernel: kernels.count(kernel) for kernel in kernels}
            measured, refused = found(partial(all_figures, counts))
            row = shared | {"function": name, "kernels": measured}
            rows.append(row | ({"error": refused} if refused else {}))
        if error:
            rows.append(shared | {"function": "…", "kernels": [], "error": error})
        print(card.name, case, *(name for name, _ in parts), error, flush=True)

    rows: list[dict[str, Any]] = []
    with playing(card, run):
        for call in calls:
            if call.is_compiled:

                def run_call(call: Call = call) -> list[tuple[str, int]]:
                    run_fused(call)
                    return [(call.name, len(launched))]

                rows_of(call.case, largest(call), run_call)
        for case, words in LARGE.items():
            config = configured(words)
            size = config.micro_batch_size * config.model.seq_length * config.model.hidden_size
            rows_of(case, size, partial(run_blocks, config, lambda: len(launched)))
    return rows


def found(run: Callable[[], list]) -> tuple[list, str]:
    """Returns the result of `run` on fake tensors, and the error that it raises."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._dynamo.reset()
    try:
        with FakeTensorMode():
            return run(), ""
    except Exception as error:
        traceback.print_exc()
        return [], f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def on_card(x: Tensor) -> Tensor:
    """Returns a fake tensor of the GPU with the shape and the strides of `x`."""
    import torch

    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def run_fused(call: Call, given: tuple[Any, ...] | None = None) -> Any:
    """Calls the function as a run does. Raises RuntimeError if it is not compiled.

    Args:
        given: arguments on the GPU; None: new ones like the recorded arguments.
    """
    from torch import Tensor

    from parallel3d.device.fused import fused

    if given is None:
        given = tuple(on_card(a) if isinstance(a, Tensor) else a for a in call.arguments)
    function = fused(call.function.function, least=call.function.least)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("parallel3d.device.fused")
    log.addHandler(handler)
    try:
        result = function(*given)
    finally:
        log.removeHandler(handler)
    if warnings:
        raise RuntimeError(warnings[0])
    return result


def run_blocks(config: Config, launches: Callable[[], int]) -> list[tuple[str, int]]:
    """Runs forward and backward of all layers under `compile=true`; returns `launches()` after
    each."""
    import torch

    from parallel3d.blueprint.blueprint import Blueprint
    from parallel3d.comm.group import SINGLE
    from parallel3d.models.layers import BuildContext
    from parallel3d.models.transformer import Stage, compile_blocks
    from parallel3d.parameters.initializer import Initializer
    from parallel3d.parameters.spec import ParameterSpec

    class Empty(Initializer):
        """Replaces parameters as the engine does for the forward: in bf16, here without values."""

        def values(self, spec: ParameterSpec) -> Tensor:
            return torch.empty(spec.shape, dtype=torch.bfloat16, device=self.device)

    device, model = torch.device("cuda", 0), config.model
    context = BuildContext.of_run(
        Blueprint.of(config), Empty(config.seed, torch.float32, device), SINGLE
    )
    stage = Stage(model, range(model.num_layers), False, False, context)
    compile_blocks([stage], saves_operands=False)
    size = (config.micro_batch_size, model.seq_length, model.hidden_size)
    x = torch.empty(size, dtype=torch.bfloat16, device=device, requires_grad=True)
    samples = torch.empty(size[0], dtype=torch.int64, device=device) if model.dropout else None
    positions, documents = stage.positions_and_documents(*size[:2])
    y = stage.run_blocks([*stage.blocks.values()], x, positions, samples, documents)
    parts = [(f"{model.num_layers} blocks, forward", launches())]
    y.backward(torch.empty_like(y))
    return [*parts, (f"{model.num_layers} blocks, backward", launches())]


def largest(call: Call) -> int:
    """Returns the number of elements of the largest argument."""
    from torch import Tensor

    return max(a.numel() for a in call.arguments if isinstance(a, Tensor))


def all_figures(launches: Mapping[Any, int]) -> list[dict[str, Any]]:
    """Returns figures of kernels, weighted by their numbers of launches."""
    return [figures(kernel, count) for kernel, count in launches.items()]


def figures(kernel: Any, launches: int) -> dict[str, Any]:
    """Compiles every candidate configuration of a kernel and reads its machine code.

    `bytes`: the bytes that a launch reads and writes, by the compiler's own count.
    """
    candidates = []
    for candidate in kernel.configs:
        binary = kernel._precompile_config(candidate).kernel
        blocks = " ".join(f"{name}={size}" for name, size in candidate.kwargs.items())
        code = resources(dump(binary.asm["cubin"]))
        code |= {"shared": binary.metadata.shared, "warps": candidate.num_warps}
        candidates.append({"blocks": blocks} | code)
    moved = round(1e9 * kernel.inductor_meta["kernel_num_gb"])
    name = kernel.inductor_meta["kernel_name"]
    return {"kernel": name, "launches": launches, "bytes": moved, "candidates": candidates}


def dump(cubin: bytes) -> str:
    """Returns the resources of the machine code, by `cuobjdump` of Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Twins:
    """Holds the values of fake tensors on the CPU; fake tensors that share memory share it there,
    too."""

    def __init__(self) -> None:
        self.memory: dict[int, Tensor] = {}
        self.kept: list[Tensor] = []  # a storage's address identifies it as long as it lives

    def of(self, fake: Tensor, *, is_read: bool = True) -> Tensor:
        """Returns a CPU tensor of the same shape, strides and dtype; writing to it writes to the
        fake tensor.

        Raises RuntimeError if it is read and nothing was written to its memory.
        """
        import torch
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        storage = fake.untyped_storage()
        shape, strides, offset = tuple(fake.shape), fake.stride(), fake.storage_offset()
        with unset_fake_temporarily():
            if storage._cdata not in self.memory:
                if is_read:
                    raise RuntimeError("a kernel reads a buffer that no kernel has written")
                self.memory[storage._cdata] = torch.zeros(storage.nbytes(), dtype=torch.uint8)
                self.kept.append(fake)
            typed = self.memory[storage._cdata].view(fake.dtype)
            return typed.as_strided(shape, strides, offset)

    def put(self, fake: Tensor, values: Tensor) -> Tensor:
        """Gives a fake tensor its values; returns it."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        twin = self.of(fake, is_read=False)
        with unset_fake_temporarily():
            twin.copy_(values)
        return fake


def interpreted(card: Card, calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Compares the results of each function's kernels with its plain form in float64.

    Triton's interpreter runs the kernels that TorchInductor wrote for `card` on values on the CPU.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    from parallel3d.device import fused

    fused.LEAST_ELEMENTS = 0
    twins, launches = Twins(), []
    plain_run = CachingAutotuner.run

    def run(kernel: Any, *arguments: Any, stream: int, **how: Any) -> None:
        names = list(kernel.triton_meta["signature"])
        real = [
            twins.of(a, is_read=name.startswith("in_ptr")) if isinstance(a, FakeTensor) else a
            for name, a in zip(names, arguments, strict=False)
        ]
        with unset_fake_temporarily():
            plain_run(kernel, *real, stream=stream, **how)
        launches.append(kernel)

    rows = []
    with playing(card, run), interpreting():
        for call in calls:
            for kind in ("as called", "in fp32"):
                launches.clear()
                given = call if kind == "as called" else widened(call)
                differences, error = found(partial(compared, given, twins))
                row: dict[str, Any] = {"card": card.name, "case": call.case}
                row |= {"function": call.name, "kind": kind}
                row |= {"launches": len(launches), "results": differences}
                rows.append(row | ({"error": error} if error else {}))
                print("interpreted", *row.values(), error, flush=True)
    return rows


def widened(call: Call) -> Call:
    """Returns the same call with fp32 in place of bf16."""
    import torch
    from torch import Tensor

    wide = tuple(
        a.float() if isinstance(a, Tensor) and a.dtype == torch.bfloat16 else a
        for a in call.arguments
    )
    return replace(call, arguments=wide)


def compared(call: Call, twins: Twins) -> list[dict[str, Any]]:
    """Returns, for every result and every argument that is written to, its difference from the
    plain form."""
    from torch import Tensor
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    given = tuple(twins.put(on_card(a), a) if isinstance(a, Tensor) else a for a in call.arguments)
    results = tensors(run_fused(call, given)) + tensors(given)
    ours = [twins.of(x) for x in results]
    with unset_fake_temporarily():
        exact = tuple(
            a.double() if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in (a.clone() if isinstance(a, Tensor) else a for a in call.arguments)
        )
        plain = tuple(a.clone() if isinstance(a, Tensor) else a for a in call.arguments)
        function = call.function.function
        wanted = tensors(function(*exact)) + tensors(exact)
        rounded = tensors(function(*plain)) + tensors(plain)
        return [difference(a, b, c) for a, b, c in zip(ours, wanted, rounded, strict=True)]


def tensors(values: Any) -> list[Tensor]:
    from torch import Tensor

    values = values if isinstance(values, tuple) else (values,)
    return [value for value in values if isinstance(value, Tensor)]


def difference(ours: Tensor, exact: Tensor, plain: Tensor) -> dict[str, Any]:
    """Returns the error of a result; `is_right` if it is at most one rounding.

    Integers must equal the plain form's, and zeros must be where the exact value has them, as a
    hash selects dropout's zeros. (A sum that the plain form rounds twice may be zero because of
    that.)
    """
    import torch

    row: dict[str, Any] = {"type": str(ours.dtype), "elements": ours.numel()}
    if not ours.is_floating_point():
        return row | {"error": 0.0, "is_right": torch.equal(ours, plain)}
    scale = float(exact.abs().max()) or 1.0
    error = float((ours.double() - exact).abs().max()) / scale
    of_plain = float((plain.double() - exact).abs().max()) / scale
    right = error <= TOLERANCES[str(ours.dtype)] and torch.equal(ours == 0, exact == 0)
    return row | {"error": error, "of_plain": of_plain, "is_right": right}


if __name__ == "__main__":
    main()
