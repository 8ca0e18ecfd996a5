"""The lines of `benchmarks.gpu_first` that ask the card and torch's kernels."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile, supported_activities

from benchmarks.gpu_rows import SIZES, Size, gemm_row, seconds_of
from parallel3d.device import accelerator
from parallel3d.metrics.peak import datasheet_peak

PASS, DIFFERS, NOTED, SKIPPED = "PASS", "DIFFERS", "NOTED", "SKIPPED"
OLDEST_TORCH = (2, 11)
FASTEST_WITHIN = 1.1  # of the time of the best kernel: what the default may take
NEEDED_SHARE = 0.70  # of the datasheet's peak, in a GEMM of 8192³


@dataclass(frozen=True)
class Given:
    """What a line knows: the device, how much to ask of it, where to write, earlier answers."""

    device: torch.device
    size: str  # full or tiny
    folder: Path
    earlier: dict[str, Any]
    micro_batch: int = 8

    @property
    def is_tiny(self) -> bool:
        return self.size == "tiny"

    @property
    def on_accelerator(self) -> bool:
        return accelerator.is_accelerator(self.device)

    @property
    def is_timed(self) -> bool:
        """Whether times and shares mean something: not those of a CPU, nor of tiny shapes."""
        return self.on_accelerator and not self.is_tiny

    def steps(self) -> Size:
        return SIZES[self.size]


class Answer(NamedTuple):
    """PASS, DIFFERS, NOTED (nothing known to compare it with) or SKIPPED; and what was found."""

    verdict: str
    found: str
    figures: dict[str, Any]


def judged(is_as_expected: bool, found: str, figures: dict[str, Any]) -> Answer:
    return Answer(PASS if is_as_expected else DIFFERS, found, figures)


def versions(given: Given) -> Answer:
    """torch, its CUDA, the driver, NCCL, cuDNN, Triton, and what the card is called."""
    figures: dict[str, Any] = {"torch": torch.__version__, "device": accelerator.name(given.device)}
    figures["cuda"] = torch.version.cuda
    figures["cudnn"] = torch.backends.cudnn.version()
    figures["driver"] = _driver()
    if dist.is_nccl_available():
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if given.on_accelerator:
        figures["devices"] = accelerator.module(given.device).device_count()
    recent = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= OLDEST_TORCH
    found = ", ".join(f"{name} {value}" for name, value in figures.items() if value is not None)
    return judged(recent, found, figures)


def gemm(given: Given) -> Answer:
    """A square bf16 product against the datasheet."""
    row = gemm_row(given.steps(), given.device)
    known = datasheet_peak(accelerator.name(given.device), "bf16")
    found = f"{row['tflops']:.3g} TFLOP/s at {row['size']}³"
    if known is None:
        return Answer(NOTED, f"{found}; no datasheet of this device here", row)
    share = row["tflops"] * 1e12 / known.flops
    found += f", {100 * share:.0f} % of {known}"
    return judged(share >= NEEDED_SHARE, found, row | {"share": share})


def accumulating_gemm(given: Given) -> Answer:
    """bf16 products added to an fp32 tensor by the GEMM itself, against float64 and two steps."""
    tokens, rows, columns = (64, 32, 48) if given.is_tiny else (8192, 2048, 8192)
    grad, x = (_normal(given, tokens, width) for width in (rows, columns))
    start = torch.randn(rows, columns, device=given.device)
    exact = start.double() + grad.double().t() @ x.double()
    scale = float(exact.square().mean().sqrt())

    def two_steps(out: Tensor) -> Tensor:
        return out.add_(grad.t() @ x)

    def one_step(out: Tensor) -> Tensor:
        return torch.addmm(out, grad.t(), x, out_dtype=torch.float32, out=out)

    def error_of(add: Callable[[Tensor], Tensor]) -> tuple[bool, float]:
        out = start.clone()
        same = add(out) is out
        return same, float((out.double() - exact).abs().max()) / scale

    figures: dict[str, Any] = {"two_steps_error": error_of(two_steps)[1]}
    scratch = start.clone()
    figures["two_steps_ms"] = 1e3 * seconds_of(
        lambda: two_steps(scratch), given.device, given.steps()
    )
    if not given.on_accelerator:
        found = f"two steps: {figures['two_steps_ms']:.3f} ms"
        return Answer(SKIPPED, f"torch's CPU has no addmm with out_dtype; {found}", figures)
    in_place, figures["one_step_error"] = error_of(one_step)
    figures["one_step_ms"] = 1e3 * seconds_of(
        lambda: one_step(scratch), given.device, given.steps()
    )
    found = (
        f"result is out: {in_place}; largest error {figures['one_step_error']:.1e} of the result's "
        f"scale (two steps {figures['two_steps_error']:.1e}); {figures['one_step_ms']:.3f} ms "
        f"(two steps {figures['two_steps_ms']:.3f} ms)"
    )
    # Rounding the product to bf16 errs by 1e-3 and more of the scale, fp32 sums by 1e-6.
    return judged(in_place and figures["one_step_error"] < 1e-4, found, figures)


def attention(given: Given) -> Answer:
    """Which kernel scaled_dot_product_attention picks, and what each takes, causal."""
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


def _attention_case(given: Given, shape: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """Times of one shape (batch, heads, kv heads, length, head dim) by kernel; absent: refused."""
    batch, heads, kv_heads, length, width = shape
    grouped = kv_heads != heads
    q, k, v = (_normal(given, batch, n, length, width) for n in (heads, kv_heads, kv_heads))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    grad = torch.randn_like(q)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), grad)

    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=grouped)
    members = SDPBackend.__members__.items()
    case: dict[str, Any] = {
        "shape": f"(b {batch}, heads {heads}/{kv_heads}, s {length}, d {width})",
        "chosen": next(name for name, member in members if int(member) == choice),
        "forward_ms": {},
        "both_ms": {},
    }
    kernels: dict[str, SDPBackend | None] = {"default": None, "flash": SDPBackend.FLASH_ATTENTION}
    if given.on_accelerator:
        kernels |= {
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
        }
    for name, kernel in kernels.items():
        try:
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                for key, call in (("forward_ms", forward), ("both_ms", both)):
                    case[key][name] = 1e3 * seconds_of(call, given.device, given.steps())
        except RuntimeError:
            if kernel is None:
                raise
            # else this kernel does not take the shape, or is not there
    # Half of the square counts: what lies above the diagonal need not be computed.
    case["default_tflops"] = 14e-9 * batch * heads * length**2 * width / 2
    case["default_tflops"] /= case["both_ms"]["default"]
    return case


def rms_norm(given: Given) -> Answer:
    """F.rms_norm in bf16: one kernel, and right."""
    tokens, width, eps = (64, 32, 1e-5) if given.is_tiny else (32768, 2048, 1e-5)
    x, weight = _normal(given, tokens, width), _normal(given, width)

    def norm() -> Tensor:
        return F.rms_norm(x, (width,), weight, eps)

    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    error = float(((norm().double() - exact).abs() / (exact.abs() + 1e-2)).max())
    kernels = device_kernels(norm)
    ms = 1e3 * seconds_of(norm, given.device, given.steps())
    figures = {"error": error, "kernels": len(kernels), "ms": ms}
    figures["gb_per_s"] = 1e-6 * 2 * x.numel() * x.element_size() / ms
    found = f"relative error {error:.1e}, {len(kernels)} kernels on the device, {ms:.3f} ms, "
    found += f"{figures['gb_per_s']:.0f} GB/s"
    return judged(error < 1e-2 and len(kernels) <= 1, found, figures)


def fused_adamw(given: Given) -> Answer:
    """torch's fused AdamW: `grad_scale` divides the gradients, and leaves them divided."""
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
    """A step of one flat fp32 parameter, from fresh moments."""
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


def device_kernels(action: Callable[[], object]) -> list[tuple[str, float]]:
    """(name, µs) of what ran on the device, in order; nothing where the profiler sees none."""
    action()
    with profile(activities=list(supported_activities())) as trace:
        action()
    events = [e for e in trace.events() if e.device_type != DeviceType.CPU]
    return [(e.name, e.time_range.elapsed_us()) for e in events if not e.name.startswith("Mem")]


def _normal(given: Given, *shape: int) -> Tensor:
    return torch.randn(shape, device=given.device, dtype=torch.bfloat16)


def _driver() -> str | None:
    """NVIDIA's driver; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.split("\n")[0].strip() or None
