"""Writes the help texts of subcommands and keys, and completes command lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent, indent, wrap
from typing import NamedTuple

from parallel3d.cli.overrides import groups, presets
from parallel3d.cli.own_model import own_model_of
from parallel3d.cli.subcommands import SUBCOMMANDS, TRAIN, Subcommand
from parallel3d.cli.verbs import Verb
from parallel3d.commands.options import CommandConfig
from parallel3d.config.fields import Key, all_keys, allowed, sections_of, spell, unknown_key
from parallel3d.errors import UserError
from parallel3d.run_config import CONFLICTS, Config, conf_dir

WIDTH = 92  # maximum number of columns in the help of a key


def complete(subcommands: Sequence[str], verbs: Mapping[str, Mapping[str, Verb]]) -> None:
    """Prints the completions of the command line in the variable COMP_LINE.

    Args:
        subcommands: all subcommands, with their verbs.
        verbs: the verbs of each subcommand by name; a subcommand without verbs has one verb whose
            name is "".
    """
    line = os.environ.get("COMP_LINE", "")
    if os.environ.get("COMP_POINT", "").isdigit():
        line = line[: int(os.environ["COMP_POINT"])]
    *typed, begun = f"{line}|".split()
    words = _next_words(typed[1:], subcommands, verbs)
    print(" ".join(word for word in words if word.startswith(begun.removesuffix("|"))))


def _next_words(
    typed: list[str], subcommands: Sequence[str], verbs: Mapping[str, Mapping[str, Verb]]
) -> Iterable[str]:
    """Returns the words that may follow the words in `typed`."""
    if not typed:
        return dict.fromkeys(app.split()[0] for app in subcommands)
    app = next((a for a in (" ".join(typed[:2]), typed[0]) if a in subcommands), None)
    if app is None:
        return [a.split()[1] for a in subcommands if [a.split()[0]] == typed]
    if typed[0] in verbs:
        return [f"{key}=" for key in verbs[typed[0]][app.partition(" ")[2]].keys]
    options = [f"{group}={name}" for group in groups() for name in presets(group)]
    return [*options, *(f"{key}=" for key in all_keys(SUBCOMMANDS[app].schema))]


class Help(NamedTuple):
    """Contains the help of a subcommand.

    Attributes:
        about: a description of the subcommand.
        examples: command lines, one per line.
        keys: the most used keys, shown in addition to the keys of the section that has the
            subcommand's name.
    """

    about: str
    examples: str
    keys: tuple[str, ...] = (
        *("tp", "pp", "dp", "sp", "micro_batch_size", "global_batch_size"),
        *("train.steps", "train.eval_every", "optim.lr", "optim.clip_grad", "model.num_layers"),
        *("model.hidden_size", "model.num_attention_heads", "model.seq_length"),
        *("data.path", "device", "seed", "run", "runs_dir"),
    )


COMMANDS = {
    "train": Help(
        "train a model, on this host or under torchrun or srun",
        """\
        parallel3d train tp=2 pp=2
        parallel3d train tp=2 dp=2 model=llama_tiny train.steps=500
        parallel3d train data=text data.path=book.txt logger=wandb
        parallel3d train experiment=llama3_1_8b data.path=corpora/web
        parallel3d train layout=auto cluster=calibrated.yaml launch.ranks=4
        parallel3d train --multirun tp=1,2 pp=1,2
        torchrun --nproc-per-node 8 -m parallel3d train tp=2 pp=2
        srun -n 8 parallel3d train tp=2 pp=2""",
    ),
    "verify": Help(
        "prove that the layout gives the same results as one process, by running both",
        """\
        parallel3d verify tp=2 pp=2 dp=2 model=llama_tiny
        parallel3d verify tp=2 sp=true verify.steps=10""",
    ),
    "topology": Help(
        "map the layout onto a cluster, price its traffic and draw it",
        """\
        parallel3d topology cluster=dgx_h100 cluster.nodes=16 tp=8 pp=4
        parallel3d topology cluster=gb200_nvl72 cluster.nodes=36 tp=4 pp=8 topology.svg=map.svg
        parallel3d topology cluster=slurm""",
    ),
    "schedule": Help(
        "draw and check a pipeline schedule; compare time, bubble and memory of all schedules",
        """\
        parallel3d schedule pp=4 num_microbatches=8 schedule=zb_h1
        parallel3d schedule pp=8 vpp=2 num_microbatches=32 schedule=zbv schedule.svg=zbv.svg
        parallel3d schedule pp=8 vpp=4 num_microbatches=32 schedule=auto \\
          schedule.costs=[1,1.2,0.8] schedule.hop=0.1 schedule.json=all.json
        parallel3d schedule pp=3 num_microbatches=6 schedule=file schedule.file=my_schedule.csv""",
    ),
    "plan": Help(
        "find the ten best layouts of a model on a cluster; given keys are kept, the others are "
        "searched",
        """\
        parallel3d plan model=llama3_70b cluster=dgx_h100 cluster.nodes=64 global_batch_size=1024
        parallel3d plan model=gpt3_175b cluster=dgx_a100 cluster.nodes=96 global_batch_size=1536
        parallel3d plan model=llama3_8b cluster=dgx_h100 cluster.nodes=2 schedule=1f1b zero=1
        parallel3d plan model=llama3_70b cluster=dgx_h100 cluster.nodes=64 plan.html=plan.html""",
    ),
    "calibrate": Help(
        "measure this machine's rates, and write a cluster file for plan and train layout=auto",
        """\
        parallel3d calibrate
        parallel3d calibrate precision=bf16 calibrate.file=here-bf16.yaml calibrate.ranks=4
        parallel3d plan cluster=calibrated.yaml model=gpt_tiny""",
    ),
    "dryrun": Help(
        "memory, kernels, traffic and time of a step on GPUs, for any world size, without a GPU",
        """\
        parallel3d dryrun model=llama_1b precision=bf16 micro_batch_size=8 cluster=dgx_h200
        parallel3d dryrun model=llama3_70b tp=8 pp=4 dp=16 sp=true zero=1 precision=bf16 \\
          micro_batch_size=1 global_batch_size=1024 cluster=dgx_h100""",
    ),
    "bench comm": Help(
        "time every collective in every group, compare it with its prediction, and name what is "
        "slow",
        """\
        parallel3d bench comm tp=2 pp=2 dp=2
        parallel3d bench comm dp=8 bench.sizes=[1048576]""",
    ),
    "eval": Help(
        "score rows of contexts and continuations by log-likelihood with a run's checkpoint",
        """\
        parallel3d eval run=my_run tasks=questions.jsonl
        parallel3d eval run=my_run tasks=questions.jsonl to=scores.json tp=2 dp=2""",
        ("run", "runs_dir", "tp", "pp", "dp", "device"),
    ),
    "generate": Help(
        "write text with the model of a run, from its newest good checkpoint",
        """\
        parallel3d generate run=my_run prompt="def "
        parallel3d generate run=my_run tp=2 generate.temperature=0.5 generate.max_tokens=500""",
        ("run", "runs_dir", "prompt", "seed", "tp", "pp", "device"),
    ),
}
# Subcommands of a script that calls `fit`, with their examples; {} stands for the script.
SCRIPT_EXAMPLES = {
    "train": """\
        python {} tp=2 pp=2
        python {} layout=auto cluster=calibrated.yaml launch.ranks=4
        torchrun --nproc-per-node 8 {} tp=2 pp=2
        PARALLEL3D_TRAIN="python {}" sbatch --nodes=8 slurm/train.sbatch tp=2""",
    "verify": """\
        python {} verify tp=2 pp=2 dp=2
        torchrun --nproc-per-node 4 {} verify tp=2 pp=2 verify.steps=10""",
    "plan": """\
        python {} plan cluster=dgx_h100 cluster.nodes=8 global_batch_size=1024""",
    "dryrun": """\
        python {} dryrun tp=2 pp=4 dp=16 global_batch_size=1024 cluster=dgx_h100""",
    "topology": """\
        python {} topology tp=8 pp=4 cluster=dgx_h100 cluster.nodes=16""",
    "eval": """\
        python {} eval run=my_run tp=2""",
}
SCRIPT_ABOUT = {
    "train": "train, without a subcommand too",
    "eval": "score the held-out samples by the newest checkpoint of a run",
}
# Subcommands that do not use Hydra; they print their own help.
FAMILIES = {
    "report run=… run=…": "a page of runs: curves, restarts, time, memory, differences",
    "slurm run|nodes|decide": (
        "be a job of Slurm, as in slurm/train.sbatch; list the nodes that a run avoids; repeat the "
        "decisions about its starts"
    ),
    "checkpoint ls|verify|export|import|average|branch|diff": (
        "list, verify and compare checkpoints, exchange them with Hugging Face, branch off"
    ),
    "data tokenize|train-tokenizer|show": "make corpora and tokenizers from text, and check them",
    "recipes [copy NAME]": "list configurations to start from; copy one to edit it",
    "init slurm [FOLDER]": "write the scripts for Slurm and torchrun into a folder",
}


def overview() -> str:
    """Returns the help of the command `parallel3d` itself."""
    rows = [(f"{app} [key=value …]", help.about) for app, help in COMMANDS.items()]
    rows += FAMILIES.items()
    listed = "\n".join(f"  parallel3d {app}\n      {about}" for app, about in rows)
    return (
        "parallel3d: transformer training with tensor, context, pipeline and data parallelism, "
        f"from one command.\n\n{listed}\n\n"
        "  parallel3d train --help           the most used keys and the presets\n"
        "  parallel3d help ddp tp …          every key of a section, or one key\n"
        "  parallel3d train --cfg job        the whole configuration, as it would run\n"
        "  parallel3d --version\n"
        '  eval "$(parallel3d -sc install=bash)"   tab completion\n\n'
        f"Pages: {conf_dir().parent / 'docs' / 'index.md'}\n"
        "Try: parallel3d train tp=2 pp=2"
    )


def of_subcommand(command: Subcommand, own: Path | None) -> str:
    """Returns the help of a subcommand. `own` is the folder of --config-dir, or None."""
    app, first = command.name, f"parallel3d {command.name}"
    about, examples, most_used = COMMANDS[app]
    if command.own is not None:
        first, examples = f"python {_script()} {app}", SCRIPT_EXAMPLES[app].replace("{}", _script())
    keys, section = all_keys(command.schema), f"{app.split()[0]}."
    sections = (section, "model.") if own_model_of(command.schema) else (section,)
    names = [name for name in keys if name.startswith(sections) or name in most_used]
    rows = [(keys[name].spelled(keys[name].default), keys[name].meta["help"]) for name in names]
    width = max(len(row[0]) for row in rows)
    listed = "\n".join(f"  {key:<{width}}  {text}" for key, text in rows)
    groups_there = "\n".join(f"  {group}: {', '.join(presets(group, own))}" for group in groups())
    options = "" if command.of_run else f"Presets (group=option)\n\n{groups_there}\n\n"
    subcommands = _of_script() if command.own is not None and app == TRAIN else ""
    return (
        f"{first} [key=value …] [Hydra's flags]: {about}.\n\n{subcommands}"
        f"Examples\n{indent(dedent(examples), '  ')}\n\n{options}"
        f"Most used keys, with their defaults (--cfg job prints all of them)\n{listed}\n\n"
        "Flags: --cfg job, --multirun (-m), --info, --config-dir; --hydra-help explains them."
    )


def _script() -> str:
    """Returns the name of the script that runs."""
    name = Path(sys.argv[0]).name
    return name if name.endswith(".py") else "my_train.py"


def _of_script() -> str:
    """Returns the list of a script's subcommands."""
    rows = [(app, SCRIPT_ABOUT.get(app, COMMANDS[app].about)) for app in SCRIPT_EXAMPLES]
    listed = "\n".join(f"  {app:<9} {about}" for app, about in rows)
    return f"Subcommands, with their keys after SUBCOMMAND --help\n{listed}\n\n"


def of_names(names: Sequence[str]) -> str:
    """Returns the help of the named keys and of all keys in the named sections.

    Raises UserError for a name that is neither a key nor a section.
    """
    keys, sections, shown = all_keys(CommandConfig), sections_of(CommandConfig), []
    for name in names:
        inside = [key for key in keys.values() if key.name.startswith(f"{name}.")]
        if name in sections:
            shown.append(f"{name}: {(sections[name].__doc__ or '').partition(chr(10))[0]}")
        elif name in keys:
            inside = [keys[name]]
        else:
            raise UserError(unknown_key(name, CommandConfig))
        shown += [_of_key(key) for key in inside]
    return "\n".join(shown)


def _of_key(key: Key) -> str:
    """Formats a key with its default, its meaning, its allowed values and its conflicts."""
    texts = [key.meta["help"], f"must be {allowed(key)}"]
    texts += [f"refused: {text}" for text in _excluded(key.name)]
    lines = [line for text in texts for line in wrap(text, WIDTH)]
    return "\n".join([key.spelled(key.default), *(f"    {line}" for line in lines)])


def _excluded(name: str) -> Iterator[str]:
    """Yields each conflict of a key: the conflicting settings, as a user would type them."""
    keys = all_keys(Config)
    for conflict in CONFLICTS:
        if name in conflict.settings:
            typed = {
                each: spell(each, condition.example(keys[each].default, keys[each].tried))
                for each, condition in conflict.settings.items()
            }
            own = typed.pop(name)
            yield f"{own} with {' and '.join(typed.values())}"
