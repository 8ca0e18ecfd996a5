"""The subcommands that Hydra composes a configuration for, and what each of them needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from parallel3d.commands.bench.checks import check_communication
from parallel3d.commands.calibrate.command import CALIBRATE, calibrate_config
from parallel3d.commands.from_run import EVAL, GENERATE
from parallel3d.commands.options import CommandConfig
from parallel3d.config.checks import check_config, single_process
from parallel3d.config.fields import all_keys
from parallel3d.config.schema import Config, sections_of
from parallel3d.errors import UserError
from parallel3d.run.directory import CONFIG_FILE

TRAIN, VERIFY, BENCH = "train", "verify", "bench comm"
OWNERS = {"prompt": GENERATE}  # of options without a section


@dataclass(frozen=True)
class Subcommand:
    """A subcommand whose words are Hydra's overrides.

    Attributes:
        alone: module of its function, which runs in this process alone; None: `run.worker.APPS` has
            the function, which runs on every rank.
        schema: its keys: a run's, or those and the options of subcommands.
        needs_data: it trains, so the corpus is checked before the ranks start.
        of_run: it takes the model from a run (`run=`).
        starts_ranks: it starts its ranks by itself, whatever launcher there is.
        resumes: with the name of a run that exists it goes on with it.
        needs_torch: packages are checked before it runs.
    """

    name: str
    alone: str | None = None
    schema: type[Config] = CommandConfig
    needs_data: bool = False
    of_run: bool = False
    starts_ranks: bool = False
    resumes: bool = False
    needs_torch: bool = True

    def goes_on(self, runs_dir: str, run: str | None) -> bool:
        """Returns whether it is given the name of a run that exists, and resumes it."""
        return self.resumes and run is not None and Path(runs_dir, run, CONFIG_FILE).is_file()

    def checked(self, config: Config, typed: Sequence[str], world_size: int | None) -> Config:
        """Returns the configuration of the ranks, checked before they start. Raises UserError.

        `typed`: the overrides; `world_size`: a launcher's ranks.
        """
        if self.name == CALIBRATE:
            return calibrate_config(cast(CommandConfig, config), typed, world_size)
        if self.name == BENCH:
            return check_communication(cast(CommandConfig, config), world_size)
        goes_on = self.goes_on(config.runs_dir, config.run)
        config = check_config(config, world_size, goes_on=goes_on)
        if self.name == VERIFY:
            single_process(config)  # refused here, once, and not by its ranks
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
        Subcommand("topology", alone="parallel3d.commands.topology", needs_torch=False),
        Subcommand("schedule", alone="parallel3d.commands.schedule", needs_torch=False),
        Subcommand("plan", alone="parallel3d.commands.plan", needs_torch=False),
        Subcommand("dryrun", alone="parallel3d.commands.dryrun.command"),
    )
}


def refuse_options_of_others(command: Subcommand, words: Sequence[str]) -> None:
    """Raises UserError for an option of subcommands where a run is typed, which has none."""
    for word in words:
        name = word.partition("=")[0].lstrip("+~")
        if name in _names(CommandConfig) and name not in _names(command.schema):
            section = name.partition(".")[0]
            owner = next(
                each for each in SUBCOMMANDS if each.split()[0] == OWNERS.get(name, section)
            )
            raise UserError(
                f"{word}: {name} is an option of parallel3d {owner}, and a run has no such key; "
                "leave it out."
            )


def _names(schema: type[Config]) -> set[str]:
    return {*all_keys(schema), *sections_of(schema)}
