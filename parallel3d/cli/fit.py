"""Trains from a user's script, with parts of the user's own (`fit`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from parallel3d.cli.command_line import FAMILIES, run_script
from parallel3d.cli.help_text import SCRIPT_EXAMPLES
from parallel3d.cli.own_model import check_not_imported, of_script
from parallel3d.cli.subcommands import SUBCOMMANDS, TRAIN, VERIFY
from parallel3d.cli.words import keys_of
from parallel3d.commands.from_run import EVAL
from parallel3d.data.keys import OWN
from parallel3d.errors import UserError, nearest_hint, print_line, readable
from parallel3d.loop.hooks import Hook
from parallel3d.loop.own_parts import OwnParts, Samples
from parallel3d.loop.user_hooks import check_hooks
from parallel3d.optim.keys import OWN as OWN_OPTIMIZER
from parallel3d.run.failure import full_stop
from parallel3d.run_config import ALTERNATIVES

if TYPE_CHECKING:
    from parallel3d.models.layer_inputs import Inputs
    from parallel3d.models.own_loss import Loss
    from parallel3d.models.own_model import Model
    from parallel3d.optim.own import OptimizerFactory


def fit(
    config: Sequence[str] = (),
    *,
    model: type[Model] | Model | partial[Model] | None = None,
    loss: Callable[[Any, Inputs], Loss] | None = None,
    hooks: Sequence[Hook] = (),
    train: Samples | None = None,
    valid: Samples | None = None,
    optimizer: OptimizerFactory | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Trains as `parallel3d train` does, with parts of the script's own.

        # my_train.py
        import parallel3d as p3d
        p3d.fit(["model=llama_tiny", "train.steps=200"], hooks=[MyHook()])

    `python my_train.py tp=2 pp=2` starts the ranks on this host. `torchrun my_train.py tp=2`, srun
    and `PARALLEL3D_TRAIN="python my_train.py" sbatch slurm/train.sbatch` start them on any hosts.
    Words of the command line replace those of the script. The run is saved and resumed, and read
    by all subcommands, as any other.

    The first word may be a subcommand: `python my_train.py verify tp=2 pp=2` compares the layout
    with one process, `plan`, `dryrun` and `topology` answer as those of `parallel3d`, and `eval`
    scores the held-out samples by the newest checkpoint of `run=`. Hooks are called in training
    alone.

    The ranks are forked from the script's process: before this call it makes no tensors on a GPU
    and computes nothing with large ones. The call returns in that process alone, when the run is
    done.

    Args:
        config: words as on the command line: keys and presets.
        model: a model of the script's own, in place of the transformer: a class of `p3d.Model`,
            `functools.partial` of one with values of fields, or an instance, which stands for its
            class with its fields. A word `model.<field>=…` replaces the script's value.
        loss: a function of the outputs of the model's head and of its `Inputs` that returns a
            `Loss`, in place of the model's own.
        train: samples to train on, in place of the text of `data`: an object with `seq_length` and
            `sample(i)`, which returns a `Sample`, the same for the same i on every rank; or a
            function of the checked configuration that returns such an object on each rank. Its
            `windows`, if it has them, are the number of samples in an epoch. For a model of the
            script's own, `sample(i)` may return any arrays and numbers by name, and `seq_length`
            is optional.
        valid: held-out samples, in the same form.
        optimizer: an element-wise optimizer, in place of `optim.name`: a class of
            `torch.optim.Optimizer`, or `functools.partial` of one with settings. `optim.lr` with
            its schedule, `optim.weight_decay`, `optim.groups` and `optim.clip_grad` still count.
        hooks: hooks around the steps, called in this order, and the same on every rank.
        arguments: the words and flags of the command line; None stands for `sys.argv[1:]`.

    Raises:
        SystemExit: if the run failed or was stopped, with the exit code of `parallel3d train`; an
            error of the user's is logged in a sentence first, and its code is 2.
    """
    check_not_imported()
    argv = list(sys.argv)
    typed = argv[1:] if arguments is None else list(arguments)
    try:
        own_model = None if model is None else of_script(model, loss)
        if model is None and loss is not None:
            raise UserError(
                "fit(loss=…) needs fit(model=…) beside it: the transformer's loss is the "
                "cross-entropy of its text, with the keys of loss.*"
            )
        check_hooks(hooks)
        name, typed = _subcommand_of(typed)
        given = _not_replaced(config, typed)
        if name == VERIFY:  # it writes a folder of its own, and not into the script's run
            given = [word for word in given if "run" not in keys_of(word)]
        words = [*given, *typed]
        if name == EVAL:
            name, words = TRAIN, [*words, "train.eval_only=true"]
        if train is not None:
            words = [*_without_text(words), f"data.name={OWN}"]
        elif valid is not None:
            raise UserError("fit(valid=…) needs fit(train=…) beside it; or give data.valid")
        if optimizer is not None:
            words = [*_without_optimizer(words), f"optim.name={OWN_OPTIMIZER}"]
    except UserError as error:
        print_line(readable(full_stop(str(error))))
        raise SystemExit(2) from None
    own, command = OwnParts(tuple(hooks), train, valid, optimizer), SUBCOMMANDS[name]
    command = replace(command, own=own, needs_data=command.needs_data and train is None)
    try:
        code = run_script(command, words, own_model)
    finally:
        sys.argv = argv  # Hydra has read its own
    if code:
        raise SystemExit(code)


def _subcommand_of(typed: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the subcommand of a script's command line, and the words after it.

    The first word may name it; otherwise the script trains. Raises UserError for a word that names
    no subcommand of a script.
    """
    word = next(iter(typed), "")
    if late := next((each for each in typed[1:] if each in SCRIPT_EXAMPLES), None):
        raise UserError(f"{late} is a subcommand, and must be the first word of the script's")
    if not word.isidentifier():
        return TRAIN, [*typed]
    if word in SCRIPT_EXAMPLES:
        return word, [*typed[1:]]
    names = ", ".join(SCRIPT_EXAMPLES)
    if word in FAMILIES or word in {name.split()[0] for name in SUBCOMMANDS}:
        line = " ".join(["parallel3d", *typed])
        raise UserError(
            f"{word} takes no part of a script: run {line}; a script's first word may be {names}"
        )
    raise UserError(
        f"{word} is not a subcommand of a script: it must be one of {names}"
        f"{nearest_hint(word, SCRIPT_EXAMPLES)}; without one the script trains"
    )


def _not_replaced(config: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Returns the script's words that no word of the command line replaces."""
    if isinstance(config, str) or not all(isinstance(word, str) for word in config):
        raise UserError(
            f"fit({config!r}) must have a list of words as on the command line, such as "
            'fit(["model=llama_tiny", "train.steps=200"])'
        )
    given = {name for word in typed for name in keys_of(word)}
    for group in ALTERNATIVES:  # a word for one of them also replaces the others
        given |= {*group} if given & {*group} else set()
    return [word for word in config if not given & {*keys_of(word)}]


def _without_text(words: Sequence[str]) -> list[str]:
    """Returns the words, none of which may choose a text. Raises UserError."""
    for word in words:
        for key in keys_of(word):
            if key == "data" or (key.startswith("data.") and key != "data.document_mask"):
                raise UserError(
                    f"{word} has no effect on the samples that the script gives fit(train=…); "
                    "leave it out"
                )
    return list(words)


def _without_optimizer(words: Sequence[str]) -> list[str]:
    """Returns the words, none of which may choose an optimizer. Raises UserError."""
    for word in words:
        if {"optim", "optim.name"} & {*keys_of(word)}:
            raise UserError(
                f"{word} has no effect beside the optimizer that the script gives "
                "fit(optimizer=…); leave it out"
            )
    return list(words)
