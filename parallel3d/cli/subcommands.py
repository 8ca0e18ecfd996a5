"""Lists the subcommands whose configuration Hydra composes, and how each of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from parallel3d.checkpoint.runs import CONFIG_FILE
from parallel3d.commands.bench.checks import check_communication
from parallel3d.commands.calibrate import CALIBRATE, calibrate_config
from parallel3d.commands.from_run import EVAL, GENERATE
from parallel3d.commands.options import CommandConfig
from parallel3d.config.fields import all_keys, sections_of
from parallel3d.errors import UserError
from parallel3d.run.worker import APPS, Work
from parallel3d.run_config import Config, check_config, single_process

if TYPE_CHECKING:
    from parallel3d.loop.own_parts import OwnParts

TRAIN, VERIFY, BENCH = "train", "verify", "bench comm"
OWNERS = {"prompt": GENERATE}  # option outside of any section → the subcommand that it belongs to


@dataclass(frozen=True)
class Subcommand:
    """Describes a subcommand whose arguments are overrides for Hydra.

    Attributes:
        name: the subcommand's name on the command line.
        alone: the module of the subcommand's function if it runs only in this process, or None if
            it runs on every rank and is in `run.worker.APPS`.
        schema: the class that defines the keys: `Config` for the keys of a run, or `CommandConfig`
            to include the options of subcommands.
        needs_data: whether the subcommand trains, so that the corpus is checked before the ranks
            start.
        of_run: whether the subcommand takes the model from a run (`run=`).
        starts_ranks: whether the subcommand always starts its ranks itself, and refuses a launcher.
        resumes: whether the subcommand resumes a run of the given name if there is one.
        needs_torch: whether the versions of torch and other packages are checked first.
        own: the parts of a script, which its function takes as `own`; None without a script.
    """

    name: str
    alone: str | None = None
    schema: type[Config] = CommandConfig
    needs_data: bool = False
    of_run: bool = False
    starts_ranks: bool = False
    resumes: bool = False
    needs_torch: bool = True
    own: OwnParts | None = None

    @property
    def work(self) -> Work | None:
        """What every rank does with the parts of a script; None without a script."""
        if self.own is None:
            return None
        module, name = APPS[self.name]
        return partial(getattr(import_module(module), name), own=self.own)

    def resumes_run(self, runs_dir: str, run: str | None) -> bool:
        """Returns whether the subcommand resumes a run, because one with this name exists."""
        return self.resumes and run is not None and Path(runs_dir, run, CONFIG_FILE).is_file()

    def checked(self, config: Config, typed: Sequence[str], world_size: int | None) -> Config:
        """Returns the checked configuration for the ranks. Raises UserError if it is invalid.

        Args:
            typed: the overrides on the command line.
            world_size: the launcher's number of ranks; None without a launcher.
        """
        if self.name == CALIBRATE:
            return calibrate_config(cast(CommandConfig, config), typed, world_size)
        if self.name == BENCH:
            return check_communication(cast(CommandConfig, config), world_size)
        may_resume = self.resumes_run(config.runs_dir, config.run)
        own_samples = not self.needs_data
        config = check_config(config, world_size, own_samples=own_samples, may_resume=may_resume)
        if self.name == VERIFY:
            single_process(config)  # so that a bad layout is refused once and not on every rank
        return config


SUBCOMMANDS = {
    command.name: command
    for command in (
        Subcommand(TRAIN, schema=Config, needs_data=True, resumes=True),
        Subcommand(VERIFY, needs_data=True),
        Subcommand(BENCH),
        Subcommand(CALIBRATE),
        Subcommand(GENERATE, of_run=True, starts_ranks=True),
        Subcommand(EVAL, of_run=True),
        Subcommand("topology", alone="parallel3d.commands.topology.command", needs_torch=False),
        Subcommand("schedule", alone="parallel3d.commands.schedule", needs_torch=False),
        Subcommand("plan", alone="parallel3d.commands.plan", needs_torch=False),
        Subcommand("dryrun", alone="parallel3d.commands.dryrun"),
    )
}


def refuse_options_of_others(command: Subcommand, words: Sequence[str]) -> None:
    """Raises UserError for an option of another subcommand, such as `verify.steps` for train."""
    for word in words:
        name = word.partition("=")[0].lstrip("+~")
        if name in _names(CommandConfig) and name not in _names(command.schema):
            section = name.partition(".")[0]
            owner = next(
                each for each in SUBCOMMANDS if each.split()[0] == OWNERS.get(name, section)
            )
            raise UserError(
                f"{word}: {name} is an option of parallel3d {owner} and not of parallel3d "
                f"{command.name}; leave it out."
            )


def _names(schema: type[Config]) -> set[str]:
    return {*all_keys(schema), *sections_of(schema)}
