"""Tests which of PyTorch's kernels `attention_kernel` selects, and refusals before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention as registry
from torch import Tensor

from parallel3d.comm.group import SINGLE
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.checkpoint.proof import rows_of
from parallel3d.commands.verify import variants
from parallel3d.config.values import in_other_precision
from parallel3d.context_parallel.document_attention import NOT_CUDNN, allowed
from parallel3d.device import accelerator
from parallel3d.errors import UserError
from parallel3d.loop import notices
from parallel3d.models import attention
from parallel3d.models.attention import (
    AttentionOptions,
    avoids_cudnn,
    causal_attention,
    choose_kernel,
)
from parallel3d.models.checkpointing import recomputed
from parallel3d.models.decoding import Decoder
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.parameters.initializer import Initializer
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config
from tests.operators import Operators
from tests.unit.commands.test_generate import LLAMA, decoder_of
from tests.unit.context_parallel.test_document_attention import documents

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
WHOLE, PACKED = LayerInputs(), LayerInputs(documents=documents([(33,), (5, 8, 140)]))
Attend = Callable[[Tensor, AttentionOptions], Tensor]


def config(kernel: str, precision: str = "bf16", **keys: Any) -> Config:
    model = ModelConfig(num_attention_heads=HEADS, num_query_groups=KV_HEADS, head_dim=HEAD_DIM)
    made = Config(attention_kernel=kernel, model=model, **keys)
    made.precision.name = precision
    return made


def whole(qkv: Tensor, options: AttentionOptions) -> Tensor:
    return causal_attention(qkv, SHAPE, WHOLE, options)


def packed(qkv: Tensor, options: AttentionOptions) -> Tensor:
    return causal_attention(qkv, SHAPE, PACKED, options)


def again(qkv: Tensor, options: AttentionOptions) -> Tensor:
    """Runs attention that is recomputed in the backward, outside of any context that selects a
    kernel."""
    return recomputed(whole, qkv, options)


def values(attend: Attend, kernel: str) -> list[Tensor]:
    """Returns the result and the gradient."""
    generator = torch.Generator().manual_seed(4)
    shape = (2, 150, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    qkv = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    y = attend(qkv, AttentionOptions(kernel))
    return [y.detach(), *torch.autograd.grad(y.square().sum(), qkv)]


def run(attend: Attend, kernel: str) -> tuple[list[Tensor], list[str]]:
    """Returns the output and the gradients, and the operators that ran."""
    with Operators() as operators:
        return values(attend, kernel), operators.names


@pytest.mark.slow
@pytest.mark.parametrize("attend", [whole, packed, again])
def test_the_kernel_asked_for_runs_and_gives_the_same_values(attend: Attend) -> None:
    usual, names = run(attend, "auto")
    flash = [name for name in names if "flash" in name]
    assert flash
    for kernel in ("flash", NOT_CUDNN):
        found, names = run(attend, kernel)
        assert [name for name in names if "flash" in name] == flash
        assert all(map(torch.equal, found, usual))
    found, names = run(attend, "math")
    assert not any("flash" in name for name in names)
    torch.testing.assert_close(found, usual, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("attend", [whole, packed, again])
def test_a_compiled_block_has_the_kernel_in_its_graphs(attend: Attend) -> None:
    """Tests that the kernel of an earlier value is not used again. Documents are one operator,
    which gets the kernel as an argument."""
    from functorch.compile import make_boxed_func  # the two imports take seconds
    from torch._dynamo.backends.common import aot_autograd

    text: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        text.append(graph.code)
        return make_boxed_func(graph.forward)

    usual = values(attend, "auto")
    compiled = torch.compile(
        attend, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=False
    )
    for kernel, has_flash in (("flash", True), ("math", False)):
        text.clear()
        found = values(compiled, kernel)
        assert len(text) == 2
        assert all(("flash" in code) == has_flash for code in text), text
        torch.testing.assert_close(found, usual, rtol=1e-12, atol=1e-12)


def test_kernel_flags_are_set_inside_and_restored_outside() -> None:
    flags = torch.backends.cuda
    with allowed(NOT_CUDNN):
        assert flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled()
        assert flags.math_sdp_enabled() and not flags.cudnn_sdp_enabled()
    with allowed("cudnn"):
        assert flags.cudnn_sdp_enabled() and not flags.flash_sdp_enabled()
        assert not flags.math_sdp_enabled()
    with allowed("auto"):
        assert flags.cudnn_sdp_enabled() and flags.flash_sdp_enabled()


def test_generation_attends_by_the_kernel_of_its_context() -> None:
    decoder, stage = decoder_of(LLAMA)
    tokens, found = [3, 1, 4], []
    for kernel in ("auto", "math"):
        for block in stage.layers.values():
            block.attention.options = replace(block.attention.options, kernel=kernel)
        fresh = Decoder(LLAMA, decoder.groups, stage)
        with Operators() as operators:
            found.append([fresh.logits(tokens), fresh.logits([*tokens, 5])])
        assert any("flash" in name for name in operators.names) == (kernel == "auto")
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_layers_are_built_with_the_chosen_kernel() -> None:
    init = Initializer(0, torch.float32, CPU)
    for kernel in ("auto", "math", "flash"):
        blueprint = blueprint_of(config(kernel))
        assert BuildContext.of_run(blueprint, init, SINGLE).attention_kernel == kernel


@pytest.mark.parametrize("kernel", ["flash", "math", "cudnn", "fa3"])
def test_verify_uses_the_kernel_only_in_the_runs_precision(kernel: str) -> None:
    made = [variant.config for variant in variants(config(kernel), 2)]
    kernels = {each.precision.name: each.attention_kernel for each in made}
    assert kernels == {"fp64": "math" if kernel == "math" else "auto", "bf16": kernel}
    assert in_other_precision(kernel) == kernels["fp64"]


# --- cuDNN on Blackwell -----------------------------------------------------------------------


def shows(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Pretends that there is a GPU of this compute capability."""
    module = SimpleNamespace(get_device_capability=lambda device: capability)
    monkeypatch.setattr(accelerator, "module", lambda device: module)


@pytest.mark.parametrize(
    ("tp", "precision", "capability", "expected"),
    [
        (1, "bf16", (10, 0), "auto"),  # eight key-value heads
        (2, "bf16", (10, 0), NOT_CUDNN),  # four: a layout must not change the model
        (2, "fp16", (10, 3), NOT_CUDNN),
        (16, "bf16", (10, 0), NOT_CUDNN),  # one head, on two ranks
        (2, "fp32", (10, 0), "auto"),  # cuDNN does not take this dtype
        (2, "bf16", (9, 0), "auto"),
        (2, "bf16", (12, 0), "auto"),
    ],
)
def test_auto_leaves_out_cudnn_where_it_is_reported_to_be_wrong(
    tp: int,
    precision: str,
    capability: tuple[int, int],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shows(monkeypatch, capability)
    made = Config(tp=tp, model=ModelConfig(num_attention_heads=32, num_query_groups=8))
    made.precision.name = precision
    assert choose_kernel(blueprint_of(made), CUDA) == expected
    assert avoids_cudnn(blueprint_of(made), CUDA) == (expected == NOT_CUDNN)
    assert choose_kernel(blueprint_of(made), CPU) == "auto"
    # ROCm numbers compute capabilities differently.
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choose_kernel(blueprint_of(made), CUDA) == "auto"


def test_a_model_without_attention_leaves_out_no_kernel_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shows(monkeypatch, (10, 0))
    made = Config(model=ModelConfig(layer_types=["gated_deltanet"]))
    made.precision.name = "bf16"
    assert choose_kernel(blueprint_of(made), CUDA) == "auto"
    assert rows_of(made.model, [])  # a proof of an export compares some tokens


def test_a_start_logs_that_cudnn_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = ProcessGroups.single()
    for capability, lines in (((9, 0), 0), ((10, 0), 1)):
        shows(monkeypatch, capability)
        notices.log_choices(config("auto"), groups, CUDA)
        said = "".join(capsys.readouterr())
        assert said.count("\n") == said.count("attention_kernel=auto excludes cuDNN") == lines


def test_cudnn_by_name_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    shows(monkeypatch, (10, 0))
    monkeypatch.setattr(attention, "_try", lambda *_: None)
    assert choose_kernel(blueprint_of(config("cudnn")), CUDA) == "cudnn"
    assert not avoids_cudnn(blueprint_of(config("cudnn")), CUDA)


# --- what is refused --------------------------------------------------------------------------


def refusal(made: Config) -> str:
    with pytest.raises(UserError) as raised:
        choose_kernel(blueprint_of(made), CPU)
    sentence = str(raised.value)
    assert "\n" not in sentence and sentence.endswith(".") and "nearest is" in sentence
    return sentence


def test_a_kernel_that_does_not_run_here_is_refused_in_a_sentence() -> None:
    sentence = refusal(config("cudnn"))
    assert "attention_kernel=cudnn" in sentence and "heads of 8 in bfloat16" in sentence
    assert "this CPU" in sentence and "attention_kernel=auto" in sentence


def test_a_kernel_whose_backward_fails_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("no execution plan.\nand a long explanation")

    monkeypatch.setattr(attention, "causal_attention", lambda x, *_: Forward.apply(x))
    with torch.no_grad():  # generation tries the kernel, too
        assert "(no execution plan);" in refusal(config("flash"))


def test_the_trial_has_the_number_of_heads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []

    def attend(qkv: Tensor, heads: Any, _: LayerInputs, options: AttentionOptions) -> Tensor:
        seen.append((tuple(qkv.shape), qkv.dtype, heads, options.kernel))
        return qkv * 1

    monkeypatch.setattr(attention, "causal_attention", attend)
    assert choose_kernel(blueprint_of(config("flash", "fp16", tp=4)), CPU) == "flash"
    assert seen == [((1, 128, 3 * HEAD_DIM), torch.float16, (1, 1, HEAD_DIM), "flash")]


# --- flash attention of another package ------------------------------------------------------


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces torch's own registry, with two packages that do not exist; returns the activated
    packages."""
    names: list[str] = []

    def register(name: str) -> Any:
        names.append(name)
        return SimpleNamespace(remove=lambda: None)

    entries = {"FA3": lambda: register("FA3"), "FA4": lambda: register("FA4")}
    monkeypatch.setattr(registry._registry, "_FLASH_ATTENTION_IMPLS", entries)
    monkeypatch.setattr(registry._registry, "_FLASH_ATTENTION_ACTIVE", None)
    return names


def test_a_package_is_activated_once_and_is_flash_attention_from_then_on(
    activated: list[str],
) -> None:
    for _ in range(2):
        assert choose_kernel(blueprint_of(config("fa3")), CPU) == "flash"
    assert activated == ["FA3"]
    assert choose_kernel(blueprint_of(config("fa4")), CPU) == "flash"
    assert activated == ["FA3", "FA4"]


def test_other_kernels_activate_nothing(activated: list[str]) -> None:
    for kernel in ("auto", "flash", "math"):
        choose_kernel(blueprint_of(config(kernel)), CPU)
    assert activated == []


def test_a_dry_run_activates_nothing(activated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "has_values", lambda device: False)
    assert choose_kernel(blueprint_of(config("fa3")), CPU) == "flash"
    assert activated == []


def test_a_package_that_is_not_installed_is_refused() -> None:
    """Activates the package by torch's own entry point, which imports it."""
    sentence = refusal(config("fa3"))
    assert "cannot use flash_attn_interface here" in sentence
    assert "No module named 'flash_attn_interface'" in sentence


def test_a_package_that_torch_does_not_offer_is_refused(
    activated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry._registry._FLASH_ATTENTION_IMPLS.pop("FA4")
    assert "Unknown flash attention impl 'FA4'" in refusal(config("fa4"))
    monkeypatch.delattr(registry, "activate_flash_attention_impl")
    assert "has no attribute" in refusal(config("fa4"))


def test_a_package_of_another_gpu_is_refused_when_it_is_tried(
    activated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("FA3 SDPA forward unsupported: FA3 requires compute capability 9.0")

    monkeypatch.setattr(attention, "causal_attention", attend)
    assert "FA3 requires compute capability 9.0" in refusal(config("fa3"))
