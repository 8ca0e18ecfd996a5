"""Trains on one rank, from the process groups to the last checkpoint (`parallel3d train`)."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist

from parallel3d.build import Trainer, groups_of_run
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.init_from import load_initial
from parallel3d.checkpoint.runs import KEPT_FILE, KEPT_FOLDER
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.errors import TrainingFailure, print_line
from parallel3d.estimate.network import collective_time
from parallel3d.estimate.search import style_seconds, with_style
from parallel3d.faults.probe import preflight
from parallel3d.faults.watchdog import start_watchdog
from parallel3d.loop.default_hooks import default_hooks
from parallel3d.loop.evaluation import evaluate_only
from parallel3d.loop.keys import TrainConfig
from parallel3d.loop.notices import acts_on_weights, log_notices
from parallel3d.loop.open_data import make_trainer, open_data
from parallel3d.loop.own_parts import OwnParts, opened
from parallel3d.loop.rank_run import RankRun, spent
from parallel3d.loop.recording import facts_of_samples, facts_of_text, header_facts, open_recorder
from parallel3d.loop.requeue import REQUEUE, leave_marker
from parallel3d.loop.run_steps import run_steps
from parallel3d.loop.save_clock import SaveClock, save_clock
from parallel3d.loop.user_hooks import UserHooks
from parallel3d.loop.weights import save_weights
from parallel3d.metrics.peak import peak_memory
from parallel3d.metrics.recorder import Recorder
from parallel3d.optim.checks import check_schedule_of_rate
from parallel3d.resolve import layout_of
from parallel3d.run.directory import status
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config


def train(config: Config, worker: Worker, own: OwnParts | None = None) -> None:
    """Trains until `config.train_steps` steps are done; resumes a run that has checkpoints.

    The configuration must be checked, and torch.distributed must be initialised. A run resumes from
    its newest intact checkpoint. Rank 0 writes `metrics.jsonl`, `summary.json` and, with
    `train.save_weights`, `weights-initial.safetensors` and `weights-final.safetensors` into the run
    directory. `own`: the parts that a script brings (`cli.fit.fit`), or None without a script.

    Raises:
        TrainingFailure: if the last checkpoint could not be written.
    """
    device = torch.device(worker.device)
    groups = make_groups(config, worker, device)
    user_hooks = UserHooks([] if own is None else own.hooks, groups, worker)
    if own is not None:
        user_hooks.check_same()
    config = choose_style(config, worker)
    watchdog = worker.watchdog
    assert watchdog is not None
    worker.phase = "opening the data"
    length_key = typed_length(config.train)  # the trainer turns epochs into tokens
    clock = save_clock(config, worker, print_line)
    trainer, of_text = open_trainer(config, worker, groups, device, own, clock)
    worker.phase = "looking for a checkpoint"
    user_hooks.open(trainer)
    checkpoints = Checkpoints(trainer.config, worker.run_dir, groups, print_line, user_hooks.states)
    first_step = checkpoints.restore(trainer)
    is_saved = True
    if trainer.config.train.eval_only:
        evaluate_only(trainer, worker, checkpoints.resumed)
    else:
        begun_with = take_initial_weights(trainer, worker, checkpoints)
        loaded = time.time()
        if not is_over(trainer, worker, first_step, length_key):
            facts = header_facts(trainer, of_text) if worker.rank == 0 else {}
            if worker.rank == 0 and first_step == 1 and (checkpoints.resumed or begun_with):
                print_line(acts_on_weights(trainer.config))
            facts |= begun_with
            is_saved = run(trainer, worker, checkpoints, user_hooks, facts, clock, loaded)
            worker.phase = "closing the process groups"
            watchdog.resume()
    groups.close()  # with NCCL this is collective, so that a missing rank makes it hang
    watchdog.stop()
    if not is_saved and not worker.stopped:
        raise TrainingFailure("the steps are done, but the last checkpoint was not written")


def make_groups(config: Config, worker: Worker, device: torch.device) -> ProcessGroups:
    """Starts the watchdog, makes the process groups and, with `preflight`, probes them."""
    worker.phase = "making process groups"
    worker.watchdog = start_watchdog(
        layout_of(config), worker, config.recovery, config.launch.timeout_s
    )
    groups = groups_of_run(config, worker.device, worker.placement)
    groups = groups.observed(log=worker.log)
    if worker.rank == 0:
        log_notices(config, groups, device)
    if config.preflight:
        preflight(groups, worker, print_line, config.cluster, config.launch, collective_time)
    return groups


def open_trainer(
    config: Config,
    worker: Worker,
    groups: ProcessGroups,
    device: torch.device,
    own: OwnParts | None,
    clock: SaveClock | None,
) -> tuple[Trainer, dict[str, str]]:
    """Opens the text or the script's samples, and makes the trainer; collective.

    Returns the trainer, and the lines of the header about the samples. `clock` says when to save.
    """

    def is_asked_to_stop() -> bool:
        return worker.stop.number is not None

    def is_time_to_save() -> bool:
        return clock is not None and clock.is_due()

    optimizer = None if own is None else own.optimizer
    if own is not None and (train_source := opened(own.train, "train", config)) is not None:
        valid_source = opened(own.valid, "valid", config)
        worker.phase = "building the model"
        trainer = Trainer(
            config,
            groups,
            device,
            train_source=train_source,
            valid_source=valid_source,
            stop_requested=is_asked_to_stop,
            optimizer=optimizer,
            save_requested=is_time_to_save,
        )
        return trainer, facts_of_samples(train_source, valid_source)
    has_source = config.init_from is not None
    data, corpus, sets = open_data(
        config.data, config.model, worker, groups, device, has_source=has_source
    )
    worker.phase = "building the model"
    config = dataclasses.replace(config, data=data)
    asked = is_asked_to_stop, is_time_to_save
    trainer = make_trainer(config, groups, device, corpus, sets, *asked, optimizer)
    return trainer, facts_of_text(trainer, corpus, sets)


def choose_style(config: Config, worker: Worker) -> Config:
    """Returns `config` with context_parallel.style=auto replaced by the cheapest style.

    All ranks choose the same style, and rank 0 logs the estimated waits. With cp=1 or another
    style, `config` is returned unchanged.
    """
    if config.cp == 1 or config.context_parallel.style != "auto":
        return config
    chosen = with_style(config)
    if worker.rank == 0:
        seconds = style_seconds(config)
        waits = ", ".join(f"{style} {1e3 * s:.3g} ms" for style, s in seconds.items())
        print_line(
            f"context_parallel.style=auto: {chosen.context_parallel.style}; the waits per "
            f"layer and micro-batch are {waits}"
        )
    return chosen


def typed_length(train: TrainConfig) -> str:
    """Returns the name of the key that gives the run's length: epochs, tokens or steps."""
    given = (key for key in ("epochs", "tokens") if getattr(train, key) is not None)
    return next(given, "steps")


def take_initial_weights(
    trainer: Trainer, worker: Worker, checkpoints: Checkpoints
) -> dict[str, str]:
    """Loads the weights of `init_from`, unless a checkpoint of the run was restored.

    Returns an entry for the header that names the source, or {} if nothing was loaded. Raises
    UserError if the learning-rate schedule does not fit the number of steps, which is known only
    after the data is opened.
    """
    config, optim = trainer.config, trainer.config.optim
    check_schedule_of_rate(optim, optim.lr_decay_steps or trainer.length.end)
    if checkpoints.resumed:
        return {}
    if worker.rank == 0:
        # An earlier start that was killed before its first checkpoint may have left these.
        (worker.run_dir / KEPT_FILE).unlink(missing_ok=True)
        shutil.rmtree(worker.run_dir / KEPT_FOLDER, ignore_errors=True)
    if config.init_from is None:
        return {}
    worker.phase = "reading the initial weights"
    source = load_initial(trainer, trainer.groups)
    if worker.rank == 0:
        from parallel3d.checkpoint.hf.kept import keep_keys  # few runs need it

        keep_keys(source, config.data, config.model.vocab_size, worker.run_dir)
    return {"weights": source.title + (", with its optimizer" if config.init_optimizer else "")}


def is_over(trainer: Trainer, worker: Worker, first_step: int, length_key: str) -> bool:
    """Returns whether an earlier start has finished the run, in which case rank 0 logs a line.

    `length_key` is the key of `train` that would continue the run (`typed_length`).
    """
    if first_step <= trainer.length.last_step or status(worker.run_dir) != "finished":
        return False
    if worker.rank == 0:
        done = f"run={trainer.config.run} is finished: {first_step - 1} steps are done"
        print_line(f"{done}; a larger train.{length_key} continues it")
    return True


def run(
    trainer: Trainer,
    worker: Worker,
    checkpoints: Checkpoints,
    user_hooks: UserHooks,
    facts: Mapping[str, str],
    clock: SaveClock | None,
    loaded: float,
) -> bool:
    """Runs the remaining steps and saves the results.

    `facts` contains further lines for the header, `clock` says when to save, and `loaded` is the
    Unix time at which the parameters were there. Returns whether the last checkpoint was written.
    """
    watchdog, first = worker.watchdog, trainer.steps_done + 1
    assert watchdog is not None
    if worker.rank == 0:
        (worker.run_dir / REQUEUE).unlink(missing_ok=True)  # an earlier start may have left it
    if first == 1:
        save_weights(trainer, worker, "weights-initial.safetensors")
    worker.phase = "measuring the peak"
    with (
        open_recorder(trainer, worker, checkpoints.changed, loaded)
        if worker.rank == 0
        else nullcontext() as recorder
    ):
        watchdog.resume()
        dist.barrier()  # other ranks wait idle while rank 0 measures the peak of a CPU
        if recorder is not None:
            recorder.start(facts, checkpoints.lines)
        last = trainer.length.last_step
        steps = RankRun(trainer, worker, recorder, checkpoints, user_hooks, first, last, clock)
        run_steps(steps, default_hooks(steps))
        record_totals(trainer, recorder)
        watchdog.pause()
        worker.phase = "waiting for the checkpoint"
        with spent(recorder, "checkpoint"):
            is_saved = checkpoints.close()
        if worker.stopped:
            leave_marker(trainer, worker, recorder, is_saved)
        else:
            save_weights(trainer, worker, "weights-final.safetensors")
            if recorder is not None and not is_saved:
                recorder.finish("failed")  # without a checkpoint, "finished" would be final
    return is_saved


def record_totals(trainer: Trainer, recorder: Recorder | None) -> None:
    """Records the step times by part and every rank's peak memory. The call is collective."""
    times = trainer.step_times()
    peaks = all_gather_json(
        peak_memory(trainer.device), trainer.groups.world.handle, trainer.device
    )
    if recorder is not None:
        recorder.breakdown(times, [peak for peak in peaks if peak is not None])
