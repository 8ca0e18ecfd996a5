"""Runs `parallel3d checkpoint ls|verify|export|import|branch|average|diff key=value …`.

The module does not use Hydra, because a verb has few keys, and only `import` takes keys of the
configuration. It does not import torch, so that `ls` and error messages appear at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel3d.checkpoint.manifest import KINDS
from parallel3d.cli.verbs import Verb, run_verb, whole_number
from parallel3d.config.fields import show
from parallel3d.errors import UserError, nearest_hint
from parallel3d.run_config import Config

CHECKPOINT = "checkpoint"
RUNS_DIR = "runs_dir"
DTYPES = ("fp32", "bf16", "fp16", "fp64")
CHOICES = {"dtype": DTYPES, "weights": tuple(KINDS), "prove": ("true", "false")}


RUN = {"run": "name of the run", RUNS_DIR: "folder of all runs (runs)"}
STEP = {"step": "step of the checkpoint (the newest)"}
VERBS = {
    "ls": Verb(
        "list the checkpoints of all runs, or of one, and say which are damaged (a quick look: "
        "names, sizes and manifests; verify reads every byte)",
        {"run": "name of one run (all)", RUNS_DIR: RUN[RUNS_DIR]},
        (),
        "parallel3d checkpoint ls\nparallel3d checkpoint ls run=my_run",
        paths=("runs_dir",),
    ),
    "verify": Verb(
        "read and verify every byte of a run's checkpoints; exit code 1 if one is damaged",
        RUN | {"step": "step of one checkpoint (all)"},
        ("run",),
        "parallel3d checkpoint verify run=my_run\nparallel3d checkpoint verify run=my_run step=500",
        paths=("runs_dir",),
    ),
    "export": Verb(
        "write a checkpoint's model as a Hugging Face folder (GPT-2, Llama, Qwen, Gemma, …)",
        RUN
        | {"to": "folder to create"}
        | STEP
        | {
            "dtype": f"type of the weights: {', '.join(DTYPES)} (the checkpoint's)",
            "weights": "model, or ema for the average of the weights with optim.ema_decay (model)",
        },
        ("run", "to"),
        "parallel3d checkpoint export run=my_run to=my_model\n"
        "parallel3d checkpoint export run=my_run to=my_model step=500 dtype=bf16",
        paths=("to", "runs_dir"),
    ),
    "import": Verb(
        "make a run whose checkpoint, at step 0, has the weights of a Hugging Face folder; keys "
        "of the configuration may follow",
        {"from": "folder with config.json and safetensors (GPT-2, Llama, Qwen, Gemma, …)"}
        | RUN
        | {
            "prove": "whether to compare the run's logits with those of transformers, and to "
            "import nothing if they differ (true if transformers is installed and memory suffices)"
        },
        ("from", "run"),
        "parallel3d checkpoint import from=gpt2 run=from_gpt2\n"
        "parallel3d checkpoint import from=my_llama run=tuned model.seq_length=512",
        free=True,
        paths=("from", "runs_dir"),
    ),
    "branch": Verb(
        "make a run that continues from another run's checkpoint: same step, optimizer and "
        "position in the data; the other run is not changed",
        {"from": "run, or run@step"} | RUN,
        ("from", "run"),
        "parallel3d checkpoint branch my_run@500 run=cooldown",
        names=("from",),
        paths=("runs_dir",),
    ),
    "average": Verb(
        "make a run whose checkpoint, at step 0, has the mean of the weights of several "
        "checkpoints of a run, which is not changed",
        RUN
        | {
            "last": "number of newest checkpoints",
            "steps": "steps of the checkpoints instead, as in steps=[100,200]",
            "to": "name of the new run (RUN-average)",
        },
        ("run",),
        "parallel3d checkpoint average run=my_run last=5\n"
        "parallel3d checkpoint average run=my_run steps=[300,400,500] to=my_mean",
        paths=("runs_dir",),
    ),
    "diff": Verb(
        "compare two checkpoints: weights, optimizer state, progress; exit code 1 if they differ",
        {"a": "run, or run@step", "b": "run, or run@step", RUNS_DIR: RUN[RUNS_DIR]},
        ("a", "b"),
        "parallel3d checkpoint diff my_run other_run\n"
        "parallel3d checkpoint diff my_run@100 my_run@200",
        names=("a", "b"),
        paths=("runs_dir",),
    ),
}


def checkpoint(arguments: Sequence[str]) -> int:
    """Runs a `parallel3d checkpoint …` command line. Returns its exit code.

    Raises UserError for invalid arguments, and for checkpoints that do not allow the request.
    """
    return run_verb(CHECKPOINT, VERBS, arguments, _run)


def _run(name: str, given: Mapping[str, str], overrides: list[str]) -> int:
    runs_dir, run = Path(given.get(RUNS_DIR, Config().runs_dir)), given.get("run", "")
    if name == "ls":
        from parallel3d.commands.checkpoint.listing import list_runs

        return list_runs(runs_dir, run or None)
    for key, choices in CHOICES.items():
        if (text := given.get(key)) is not None and text not in choices:
            hint = nearest_hint(text, choices, f"{key}=")
            raise UserError(f"{key}={show(text)} must be one of {', '.join(choices)}{hint}")
    if name == "average":
        last, steps = whole_number("last", given, least=1), _steps(given)
        if (last is None) == (steps is None):
            raise UserError(
                "checkpoint average must have either last=… or steps=…, as in last=5 or "
                "steps=[100,200]"
            )
        from parallel3d.commands.checkpoint.new_runs import average

        return average(runs_dir, run, last, steps, given.get("to", f"{run}-average"))
    step = whole_number("step", given)
    if name in ("verify", "diff"):
        from parallel3d.commands.checkpoint import compare

        if name == "diff":
            return compare.diff(runs_dir, given["a"], given["b"])
        return compare.verify(runs_dir, run, step)
    if name == "branch":
        from parallel3d.commands.checkpoint.new_runs import branch

        return branch(runs_dir, given["from"], run)
    from parallel3d.commands.checkpoint import huggingface

    if name == "export":
        dtype, weights = given.get("dtype"), given.get("weights", "model")
        return huggingface.export_run(runs_dir, run, Path(given["to"]), step, dtype, weights)
    prove = {"true": True, "false": False}.get(given.get("prove", ""))
    return huggingface.import_run(Path(given["from"]), run, runs_dir, overrides, prove)


def _steps(given: Mapping[str, str]) -> list[int] | None:
    """Returns the distinct steps of steps=[…], ascending, or None if they are not given."""
    if "steps" not in given:
        return None
    words = given["steps"].removeprefix("[").removesuffix("]").split(",")
    return sorted({whole_number("steps", {"steps": word.strip()}) or 0 for word in words})
