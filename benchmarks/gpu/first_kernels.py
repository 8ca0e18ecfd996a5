"""The tasks of `benchmarks.gpu_first` that identify the card and time its kernels."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.first_values import attention_kernels
from benchmarks.gpu.rows import seconds_of
from benchmarks.gpu.tasks import Given, Row, judged
from parallel3d.device import accelerator
from parallel3d.models.attention import attend

OLDEST_TORCH = (2, 11)
FASTEST_WITHIN = 1.1  # limit of the default kernel's time, relative to the best kernel's


def versions(given: Given) -> Row:
    """Returns torch, its CUDA, the driver, NCCL, cuDNN, Triton, and the card's name."""
    figures: Row = {"torch": torch.__version__, "device": accelerator.name(given.device)}
    figures["cuda"] = torch.version.cuda
    figures["cudnn"] = torch.backends.cudnn.version()
    figures["triton"] = version("triton") if find_spec("triton") is not None else None
    figures["driver"] = _driver()
    if dist.is_nccl_available():
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if given.on_accelerator:
        figures["devices"] = accelerator.module(given.device).device_count()
    recent = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= OLDEST_TORCH
    found = ", ".join(f"{name} {value}" for name, value in figures.items() if value is not None)
    return judged(recent, found, figures)


def attention(given: Given) -> Row:
    """Returns which kernel scaled_dot_product_attention picks, and the time of each, causal."""
    shapes = [(1, 4, 32, 16)] if given.is_tiny else [(8, 32, 4096, 64), (8, 24, 4096, 128)]
    good = (SDPBackend.FLASH_ATTENTION.name, SDPBackend.CUDNN_ATTENTION.name)
    cases, is_right, said = [], True, []
    for batch, heads, length, width in shapes:
        for kv_heads in (heads, 2 if given.is_tiny else 8):
            case = _attention_case(given, (batch, heads, kv_heads, length, width))
            cases.append(case)
            best = min(case["both_ms"].values())
            own = case["both_ms"]["default"]
            fast = not given.is_timed or own <= FASTEST_WITHIN * best
            is_right = is_right and case["chosen"] in good and fast
            times = ", ".join(f"{name} {ms:.2f}" for name, ms in case["both_ms"].items())
            said.append(f"{case['shape']}: {case['chosen']}, forward and backward ms: {times}")
    return judged(is_right, "; ".join(said), {"cases": cases})


def _attention_case(given: Given, shape: tuple[int, int, int, int, int]) -> Row:
    """Returns times of one shape (batch, heads, kv heads, length, head dim) by kernel; refused ones
    are missing."""
    batch, heads, kv_heads, length, width = shape
    grouped = kv_heads != heads
    # Stored as in the trainer, with the heads of a token side by side.
    q, k, v, grad = (
        torch.randn(batch, length, n, width, device=given.device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for n in (heads, kv_heads, kv_heads, heads)
    )
    grad = grad.detach()

    def forward() -> Tensor:
        return attend(q, k, v, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), grad)

    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=grouped)
    members = SDPBackend.__members__.items()
    case: Row = {
        "shape": f"(b {batch}, heads {heads}/{kv_heads}, s {length}, d {width})",
        "chosen": next(name for name, member in members if member.value == choice),
        "forward_ms": {},
        "both_ms": {},
    }
    for name, kernel in attention_kernels(given).items():
        try:
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                for key, call in (("forward_ms", forward), ("both_ms", both)):
                    case[key][name] = 1e3 * seconds_of(call, given.device, given.steps())
        except RuntimeError:
            if kernel is None:
                raise
            # without a result, this kernel does not take the shape, or does not exist
    # Half of the square counts: scores above the diagonal need not be computed.
    case["default_tflops"] = 14e-9 * batch * heads * length**2 * width / 2
    case["default_tflops"] /= case["both_ms"]["default"]
    return case


def fused_adamw(given: Given) -> Row:
    """Tests torch's fused AdamW: `grad_scale` divides the gradients, and leaves them divided."""
    count, scale = (1000 if given.is_tiny else 100_000_000), 1024.0
    weights, grads = (torch.randn(count, device=given.device) for _ in range(2))
    plain, scaled, left = weights.clone(), weights.clone(), grads * scale
    _adamw(given.device, plain, grads.clone())()
    _adamw(given.device, scaled, left, torch.full((), scale, device=given.device))()
    off, divided = float((plain - scaled).abs().max()), bool(torch.equal(left, grads))
    ms = 1e3 * seconds_of(_adamw(given.device, plain, grads), given.device, given.steps())
    figures = {"off": off, "writes_gradient": divided, "ms": ms, "gb_per_s": 28e-6 * count / ms}
    found = f"largest difference {off:.1e}, gradient left divided: {divided}, {ms:.2f} ms, "
    found += f"{figures['gb_per_s']:.0f} GB/s"
    return judged(off < 1e-6 and divided, found, figures)


def _adamw(
    device: torch.device, parameter: Tensor, grad: Tensor, grad_scale: Tensor | None = None
) -> Callable[[], None]:
    """Runs a step of one flat fp32 parameter, from fresh moments."""
    means = [torch.zeros_like(parameter) for _ in range(2)]
    count = torch.ones((), device=device)

    def step() -> None:
        torch._fused_adamw_(
            *([parameter], [grad], [means[0]], [means[1]], [], [count]),
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
        )

    return step


def _driver() -> str | None:
    """Returns NVIDIA's driver version; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.split("\n")[0].strip() or None
