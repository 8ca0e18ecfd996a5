"""Runs the checks for the first half hour on a card and compares them with expected results.

    python -m benchmarks.gpu_first

Each line runs in a process of its own with a time limit and ends in PASS, DIFFERS (from the
expected result below), FAILED, SKIPPED, or NOTED if there is nothing to compare with; results are
written to --json after each. The exit code is 1 if a line differs or fails.

For a machine that is lent for minutes and cuts off commands after ten: `--plan` prints the calls,
and `--call 1` runs the first of them. A call only starts lines that end in time, and prints the
remaining ones; `--call 1 --missing` continues with it, from the same --json.

`--device cpu --size tiny` runs every line that a CPU supports, `--device simulated` every line for
accelerators; the suite does so. Times and shares are estimates from bytes and FLOPs; docs/gpu.md
has the results of an H100 and an H200.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.gpu import card, experts, mixtures
from benchmarks.gpu import first_kernels as kernels
from benchmarks.gpu import first_runs as runs
from benchmarks.gpu import first_values as values
from benchmarks.gpu.tasks import Bench, Task

LINES = {
    "versions": Task(
        kernels.versions, 5, "torch ≥ 2.11 built for CUDA, and the names of driver and card"
    ),
    "forked rank": Task(
        runs.forked_rank,
        45,
        "a sweep's two runs of llama_tiny, each on a forked rank: three losses, which differ by "
        "seed",
        by_command=True,
    ),
    "losses": Task(
        partial(values.losses, precision="fp32"),
        20,
        "llama_tiny, fp32, 5 steps: losses agree with the CPU's to 1e-4, gradient norms to 1e-3",
    ),
    "kernels": Task(
        values.kernels,
        110,
        "every fused function at the 1B's shapes agrees with float64, to 1e-2 in bf16 and 1e-5 in "
        "fp32; dropout's hash has equal bits; every function is compiled",
    ),
    "attention values": Task(
        values.attention_values,
        30,
        "each kernel of SDPA, with the trainer's strides, with and without GQA, also for 2,112 "
        "tokens: output and gradients agree with the formula in fp32 to 1.5e-2",
    ),
    "document attention": Task(
        values.document_values,
        15,
        "the kernel for sequences of any length is chosen; output and gradients agree to 1.5e-2",
    ),
    "losses bf16": Task(
        partial(values.losses, precision="bf16"),
        60,
        "the same in bf16 with every kernel fused: losses and gradient norms agree to 1e-2",
    ),
    "train": Task(
        runs.train,
        60,
        "1B, bf16, micro-batch 8: MFU ≥ 50 % of the datasheet, peak memory about 65 GB",
        by_command=True,
    ),
    "losses experts": Task(
        partial(values.losses, precision="fp32", name="moe_tiny"),
        20,
        "moe_tiny, fp32: losses agree with the CPU's to 1e-4, gradient norms to 1e-3",
    ),
    "losses experts bf16": Task(
        partial(values.losses, precision="bf16", name="moe_tiny"),
        60,
        "the same in bf16, with experts in one GEMM: losses and gradient norms agree to 1e-2",
    ),
    "products of experts": Task(
        mixtures.products,
        30,
        "even choices, experts without rows and one with all: GEMMs agree with float64 to 1e-2, "
        "the weight gradient to 1e-4, the router to 1e-5; NaN behind the last row is not read",
    ),
    "train olmoe": Task(
        partial(mixtures.train, name="olmoe"),
        70,
        "six layers of OLMoE, bf16: MFU of active FLOPs ≥ 40 % of the datasheet",
        by_command=True,
    ),
    "dryrun olmoe": Task(
        partial(mixtures.dryrun, name="olmoe", of="train olmoe"),
        20,
        "it agrees with `train olmoe`: peak memory within 3 %, seconds within 20 %",
        by_command=True,
    ),
    "host syncs experts": Task(
        partial(experts.host_syncs, name="olmoe"),
        15,
        "one per step: no step waits for how many rows an expert gets",
    ),
    "dryrun": Task(
        runs.dryrun,
        15,
        "it agrees with `train`: peak memory within 5 %, seconds within 20 %",
        by_command=True,
    ),
    "communicators": Task(
        runs.communicators,
        10,
        "groups are made, split, used for a sum and destroyed without a hang",
    ),
    "save and resume": Task(
        runs.save_and_resume,
        130,
        "two layers of the 1B, 20 steps, saved and resumed to 30: every loss and gradient norm "
        "equals that of one run of 30; `generate` writes text",
        by_command=True,
    ),
    "trace": Task(
        runs.trace, 45, "a step of the 1B: the card is busy for 90 % of it, mostly with GEMMs"
    ),
    "host syncs": Task(runs.host_syncs, 10, "one per step: the host reads loss and norm together"),
    "gemm": card.ROWS["gemm"],
    "addmm": Task(
        values.weight_gradient,
        10,
        "the GEMM adds a weight's gradient in fp32: an error below 1e-4, and less time than a "
        "product and a sum",
    ),
    "attention": Task(
        kernels.attention,
        25,
        "flash or cuDNN is chosen, also with 8 key-value heads, and is within 10 % of the fastest",
    ),
    "adamw": Task(
        kernels.fused_adamw, 8, "fused AdamW divides by grad_scale and leaves the gradient divided"
    ),
    "train compile": Task(
        partial(runs.train, compiled=True),
        150,
        "`train` with compile=true: MFU ≥ 50 %",
        by_command=True,
    ),
}
# Tasks are in the order of their importance: first correctness and speed, then the rest of
# correctness, then the reasons of the speed and comparisons. Two calls fit into a quarter of an
# hour.
CALLS = (
    (
        *("versions", "losses", "losses experts", "kernels", "products of experts"),
        *("losses experts bf16", "train olmoe", "dryrun olmoe", "train", "dryrun"),
    ),
    (
        *("losses bf16", "attention values", "document attention", "host syncs"),
        *("host syncs experts", "forked rank", "communicators", "save and resume"),
        *("gemm", "addmm"),
    ),
    ("trace", "attention", "adamw", "fp8", "train compile", "1b side by side"),
    ("1b side by side compile", "shard llama3_70b", "shard gpt3_175b"),
)
BENCH = Bench("benchmarks.gpu_first", __doc__, LINES | card.ROWS, CALLS, tuple(LINES))
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
