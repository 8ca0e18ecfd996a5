"""Defines the trainer's own hooks around the steps; `default_hooks` lists them in order."""

from __future__ import annotations

from parallel3d.trainer import StepResult


class StepHook:
    """Base class of the trainer's own hooks; every rank has the same hooks in the same order.

    A hook overrides the methods that it needs. Each method may communicate with other ranks.
    """

    def before_run(self) -> None:
        """Runs before the first step after the run is started or resumed."""

    def before_step(self, step: int) -> None:
        """Runs before a step."""

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Runs after a step that took `seconds` of wall time."""

    def stopped(self, step: int) -> None:
        """Runs after the last step if a signal ends the run early."""
