"""Lists the hooks of `parallel3d train`, in the order in which they run around a step."""

from __future__ import annotations

from parallel3d.errors import print_line
from parallel3d.faults.health import Health
from parallel3d.loop.checkpointing import Checkpointing
from parallel3d.loop.data_check import DataCheck
from parallel3d.loop.evaluation import Evaluation
from parallel3d.loop.health_check import HealthCheck
from parallel3d.loop.profiling import StepProfiler
from parallel3d.loop.rank_run import RankRun
from parallel3d.loop.recording import BlendRecords, ExpertRecords, StepRecords
from parallel3d.loop.step_hooks import StepHook
from parallel3d.loop.timeline import StepTimeline


def default_hooks(run: RankRun) -> list[StepHook]:
    """Returns the hooks of a run on one rank."""
    profiler, data_check = StepProfiler(run.trainer, run.worker), DataCheck(run)
    return [
        StepTimeline(run),
        run.user_hooks,  # their figures are part of the step's line
        StepRecords(run, is_profiled=profiler.steps.__contains__),
        profiler,  # it prints a table, which follows the line of the step
        Evaluation(run, data_check),
        data_check,  # the files must be checked before a checkpoint is saved
        BlendRecords(run),
        ExpertRecords(run),
        HealthCheck(run, Health(run.trainer, run.checkpoints, print_line)),
        Checkpointing(run),
    ]
