"""`parallel3d checkpoint ls|verify|export|import|diff key=value …`: words in, exit code out.

No Hydra: a verb has a handful of keys, and only `import` goes on to the configuration. Nothing here
imports torch, so that `ls` and every refusal answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from parallel3d.checkpoint.manifest import reason
from parallel3d.config.fields import all_keys, nearest_key, show
from parallel3d.config.schema import Config
from parallel3d.errors import UserError, nearest
from parallel3d.files.reading import plain

CHECKPOINT = "checkpoint"
RUNS_DIR = "runs_dir"
DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True)
class Verb:
    """One verb: its keys with their help, which of them must be given, and what is said of it.

    `names` of positional words may be typed without their key; `free`: other keys go on to the
    configuration, if it has them.
    """

    about: str
    keys: Mapping[str, str]
    needs: tuple[str, ...]
    examples: str
    names: tuple[str, ...] = ()
    free: bool = False


RUN = {"run": "name of the run", RUNS_DIR: "folder of all runs (runs)"}
STEP = {"step": "step of the checkpoint (the newest)"}
VERBS = {
    "ls": Verb(
        "list the checkpoints of all runs, or of one, and say which are damaged (a quick look: "
        "names, sizes and manifests; verify reads every byte)",
        {"run": "name of one run (all)", RUNS_DIR: RUN[RUNS_DIR]},
        (),
        "parallel3d checkpoint ls\nparallel3d checkpoint ls run=my_run",
    ),
    "verify": Verb(
        "read every byte of a run's checkpoints and prove it; exit code 1 if one is damaged",
        RUN | {"step": "step of one checkpoint (all)"},
        ("run",),
        "parallel3d checkpoint verify run=my_run\nparallel3d checkpoint verify run=my_run step=500",
    ),
    "export": Verb(
        "write a checkpoint's model as a Hugging Face folder (Llama or GPT-2)",
        RUN
        | {"to": "folder to make"}
        | STEP
        | {"dtype": f"of the weights: {', '.join(DTYPES)} (as the checkpoint has them)"},
        ("run", "to"),
        "parallel3d checkpoint export run=my_run to=my_model\n"
        "parallel3d checkpoint export run=my_run to=my_model step=500 dtype=bf16",
    ),
    "import": Verb(
        "make a run whose checkpoint, at step 0, has the weights of a Hugging Face folder; keys "
        "of the configuration may follow",
        {"from": "folder with config.json and safetensors (Llama or GPT-2)"} | RUN,
        ("from", "run"),
        "parallel3d checkpoint import from=gpt2 run=from_gpt2\n"
        "parallel3d checkpoint import from=my_llama run=tuned model.seq_length=512",
        free=True,
    ),
    "diff": Verb(
        "compare two checkpoints: weights, optimizer state, progress; exit code 1 if they differ",
        {"a": "run, or run@step", "b": "run, or run@step", RUNS_DIR: RUN[RUNS_DIR]},
        ("a", "b"),
        "parallel3d checkpoint diff my_run other_run\n"
        "parallel3d checkpoint diff my_run@100 my_run@200",
        names=("a", "b"),
    ),
}


def checkpoint(words: Sequence[str]) -> int:
    """Run one `parallel3d checkpoint …` line. Returns its exit code.

    Raises UserError for a line that makes no sense, and for what the system refuses.
    """
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    name, rest = words[0], words[1:]
    if name not in VERBS:
        close = nearest(name.lstrip("-"), VERBS)
        hint = f"; the nearest is {close}" if close else ""
        raise UserError(
            f"checkpoint {name}: {name} is not a verb; it must be one of {', '.join(VERBS)}{hint}"
        )
    if {"-h", "--help"} & set(rest):
        print(_help(name))
        return 0
    given, overrides = parse(name, rest)
    try:
        return _run(name, given, overrides)
    except OSError as error:
        where = plain(f"{error.filename}: ") if error.filename else ""
        raise UserError(f"checkpoint {name}: {where}{reason(error)}") from None
    except MemoryError:
        raise UserError(f"checkpoint {name}: this host's memory does not hold it") from None


def parse(name: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The verb's own keys with their values, and the words for the configuration.

    Raises UserError, naming the nearest key, for a word that the verb does not know, for a key
    that is given twice and for one that is missing.
    """
    verb = VERBS[name]
    given: dict[str, str] = {}
    overrides = []
    left = list(verb.names)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and left and not word.startswith("-"):
            key, value = left[0], word
        elif not equals or not key:
            example = f"{next(iter(verb.keys))}={word.lstrip('-=')}"
            raise UserError(
                f"checkpoint {name}: {word} is not of the form KEY=VALUE; the nearest is {example}"
            )
        if key in given:
            raise UserError(f"checkpoint {name}: {key} is given twice")
        if key in verb.keys:
            if not value:
                raise UserError(f"checkpoint {name}: {key}= is empty; it is the {verb.keys[key]}")
            given[key] = value
            left = [k for k in left if k != key]
        elif verb.free and _is_of_configuration(key):
            overrides.append(word)
        else:
            raise UserError(f"checkpoint {name}: {_unknown(verb, key)}")
    missing = [key for key in verb.needs if key not in given]
    if missing:
        wanted = " and ".join(f"{key}=… ({verb.keys[key]})" for key in missing)
        example = verb.examples.splitlines()[0]
        raise UserError(f"checkpoint {name} needs {wanted}, as in: {example}")
    return given, overrides


def _is_of_configuration(key: str) -> bool:
    bare = key.lstrip("+~")
    return bare in all_keys() or "." in bare or bare in {k.split(".")[0] for k in all_keys()}


def _unknown(verb: Verb, key: str) -> str:
    close = nearest(key.lstrip("-"), verb.keys)
    if close is None and verb.free:
        close = nearest_key(key)
    hint = f"; the nearest is {close}" if close else ""
    return f"{key} is not one of its keys ({', '.join(verb.keys)}){hint}"


def step_of(given: Mapping[str, str]) -> int | None:
    """The step that was typed, or None. Raises UserError for what is no step."""
    text = given.get("step")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise UserError(f"step={show(text)} must be a whole number of at least 0")
    return int(text)


def _overview() -> str:
    rows = "\n".join(f"  {name:<7} {verb.about}" for name, verb in VERBS.items())
    return (
        f"parallel3d checkpoint {'|'.join(VERBS)} [key=value …]\n\n{rows}\n\n"
        "parallel3d checkpoint VERB --help lists its keys."
    )


def _help(name: str) -> str:
    verb = VERBS[name]
    width = max(map(len, verb.keys))
    keys = "\n".join(f"  {key:<{width}}  {text}" for key, text in verb.keys.items())
    examples = "\n".join(f"  {line}" for line in dedent(verb.examples).splitlines())
    typed = " ".join(verb.names).upper() or "key=value …"
    return (
        f"parallel3d checkpoint {name} {typed}: {verb.about}.\n\nExamples\n{examples}\n\n"
        f"Keys, with what they are when left out\n{keys}"
    )


def _run(name: str, given: Mapping[str, str], overrides: list[str]) -> int:
    runs_dir, run = Path(given.get(RUNS_DIR, Config().runs_dir)), given.get("run", "")
    if name == "ls":
        from parallel3d.commands.checkpoint.listing import list_runs

        return list_runs(runs_dir, run or None)
    dtype = given.get("dtype")
    if dtype is not None and dtype not in DTYPES:
        close = nearest(dtype, DTYPES)
        hint = f"; the nearest is dtype={close}" if close else ""
        raise UserError(f"dtype={show(dtype)} must be one of {', '.join(DTYPES)}{hint}")
    step = step_of(given)
    if name in ("verify", "diff"):
        from parallel3d.commands.checkpoint import compare

        if name == "diff":
            return compare.diff(runs_dir, given["a"], given["b"])
        return compare.verify(runs_dir, run, step)
    from parallel3d.commands.checkpoint import huggingface

    if name == "export":
        return huggingface.export_run(runs_dir, run, Path(given["to"]), step, dtype)
    return huggingface.import_run(Path(given["from"]), run, runs_dir, overrides)
