"""`parallel3d train`: the training loop of one rank."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import attrgetter

import torch
import torch.distributed as dist

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.layout import layout_of
from parallel3d.blueprint.ops import flops_per_token
from parallel3d.blueprint.parameters import parameter_count
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.bench.probe import preflight
from parallel3d.commands.init_from import load_initial
from parallel3d.commands.profiling import StepProfiler
from parallel3d.commands.timeline import LATER, train_drawn_step
from parallel3d.config.fields import all_keys, spell
from parallel3d.config.schema import Config, DataConfig, ModelConfig
from parallel3d.data.blend import Blended
from parallel3d.data.corpus import Blend, Corpus, open_corpus, open_sets
from parallel3d.data.loader import check_same_text
from parallel3d.data.sampler import Finite
from parallel3d.data.tokenizer import BYTE, keep_tokenizer, open_tokenizer, with_own_tokenizer
from parallel3d.data.tokens import look_at
from parallel3d.device import accelerator
from parallel3d.device.fused import fuses
from parallel3d.errors import TrainingFailure, UserError, print_line
from parallel3d.estimate.search import style_seconds, with_style
from parallel3d.faults.health import Health
from parallel3d.faults.watchdog import start_watchdog
from parallel3d.files import replace_durably
from parallel3d.host.processes import process_begun
from parallel3d.metrics.jsonl import Score, append_line, write_json
from parallel3d.metrics.peak import device_peak_flops, peak_memory
from parallel3d.metrics.recorder import Recorder, evaluation_row, layout_row
from parallel3d.metrics.screen import evaluation_lines, length_words
from parallel3d.models.attention import LEAST_KV_HEADS, avoids_cudnn
from parallel3d.optim.checks import check_schedule_of_rate
from parallel3d.optim.optimizer import EMA
from parallel3d.run.directory import config_files, status
from parallel3d.run.launch import Worker
from parallel3d.text import si
from parallel3d.trainer import StepResult, Trainer

# File in the run directory that asks a batch script to requeue the job.
REQUEUE = "requeue"
EVALUATIONS = "evaluations.jsonl"  # of `train.eval_only`


def train(config: Config, worker: Worker) -> None:
    """Trains `config.train_steps` steps; torch.distributed is initialised, the config checked.

    A run with checkpoints resumes from its newest good one. Rank 0 writes `metrics.jsonl`,
    `summary.json` and, with `train.save_weights`, `weights-initial.safetensors` and
    `weights-final.safetensors` into the run directory.

    Raises:
        TrainingFailure: the last checkpoint could not be written.
    """
    worker.phase = "making process groups"
    worker.watchdog = watchdog = start_watchdog(
        layout_of(config), worker, config.recovery, config.launch.timeout_s
    )
    device = torch.device(worker.device)
    groups = ProcessGroups.of_run(config, worker.device, worker.placement)
    groups = groups.observed(log=worker.log)
    if worker.rank == 0:
        if not config.train.eval_only and (sentence := toy_defaults(config)) is not None:
            print_line(sentence)
        saves = config.train.eval_only or config.checkpoint.every > 0
        if not saves and "SLURM_JOB_ID" in os.environ:
            print_line(
                "checkpoint.every=0 saves nothing, so a time limit or preemption of this Slurm job "
                "loses the run, and the job is not queued again"
            )
        log_choices(config, groups, device)
    if config.preflight:
        outlier = config.bench.outlier
        preflight(groups, worker, print_line, config.cluster, config.launch, outlier)
    worker.phase = "opening the data"
    has_source = config.init_from is not None
    data, corpus = open_data(
        config.data, config.model, worker, groups, device, has_source=has_source
    )
    config = dataclasses.replace(config, data=data)
    sets = open_sets(config.data, corpus, config.model.seq_length, config.model.vocab_size)
    if worker.rank == 0:
        for one in (corpus, *sets.values()):
            for sentence in one.told:
                print_line(sentence)
    for opened in sets.values():
        check_same_text(opened, groups.world, device)
    worker.phase = "building the model"
    trainer = make_trainer(config, groups, device, corpus, sets)
    given = (k for k in ("epochs", "tokens") if getattr(config.train, k) is not None)
    length_key = next(given, "steps")  # as typed: the trainer turns epochs into tokens
    config = trainer.config
    worker.phase = "looking for a checkpoint"
    checkpoints = Checkpoints(config, worker.run_dir, groups, print_line)
    first_step = checkpoints.restore(trainer)
    if config.train.eval_only:
        evaluate_only(trainer, worker, checkpoints.resumed)
        groups.close()
        watchdog.stop()
        return
    # The steps that the schedule of the rate counts are known now.
    check_schedule_of_rate(config.optim, config.optim.lr_decay_steps or trainer.length.end)
    weights: dict[str, str] = {}
    if worker.rank == 0 and not checkpoints.resumed:
        from parallel3d.commands.checkpoint.new_runs import KEPT_FILE

        (worker.run_dir / KEPT_FILE).unlink(missing_ok=True)  # of a start that saved nothing
    if config.init_from is not None and not checkpoints.resumed:
        worker.phase = "reading the initial weights"
        source = load_initial(trainer, groups)
        weights["weights"] = source.title + ", with its optimizer" * config.init_optimizer
        if worker.rank == 0:
            from parallel3d.commands.checkpoint.huggingface import keep_keys  # and Hydra

            keep_keys(source, config.data, config.model.vocab_size, worker.run_dir)
    if is_over(trainer, worker, first_step, length_key):
        groups.close()
        watchdog.stop()
        return
    if worker.rank == 0:
        (worker.run_dir / REQUEUE).unlink(missing_ok=True)  # of an earlier start
    if first_step == 1:
        save_weights(trainer, worker, "weights-initial.safetensors")
    worker.phase = "measuring the peak"
    with (
        open_recorder(trainer, worker, checkpoints.changed)
        if worker.rank == 0
        else nullcontext() as recorder
    ):
        watchdog.go_on()
        dist.barrier()  # rank 0 measures a CPU's peak alone
        if recorder is not None:
            facts = header_facts(trainer, corpus, sets) | weights
            recorder.start(facts, checkpoints.lines)
        run_steps(trainer, worker, recorder, checkpoints)
        times = trainer.step_times()
        peaks = all_gather_json(peak_memory(device), groups.world.handle, device)
        if recorder is not None:
            recorder.breakdown(times, [peak for peak in peaks if peak is not None])
        watchdog.rest()
        worker.phase = "waiting for the checkpoint"
        with spent(recorder, "checkpoint"):
            is_saved = checkpoints.close()
        if worker.stopped:
            leave_marker(trainer, worker, recorder, is_saved)
        else:
            save_weights(trainer, worker, "weights-final.safetensors")
            if recorder is not None and not is_saved:
                recorder.finish("failed")  # a finished run without a checkpoint cannot be resumed
    worker.phase = "closing the process groups"
    watchdog.go_on()
    groups.close()  # collective with NCCL, so a missing rank can hang here
    watchdog.stop()
    if not is_saved and not worker.stopped:
        raise TrainingFailure("the steps are done, but the last checkpoint was not written")


def open_data(
    data: DataConfig,
    model: ModelConfig,
    worker: Worker,
    groups: ProcessGroups,
    device: torch.device,
    *,
    has_source: bool,
) -> tuple[DataConfig, Corpus | Blend]:
    """Opens the corpus, equal on every rank; returns its keys with the run's own tokenizer.

    `has_source`: the weights came from another run or a folder (`init_from`).
    """
    data = with_own_tokenizer(data, worker.run_dir)
    corpus = open_corpus(data, model.seq_length, vocab_size=model.vocab_size)
    check_same_text(corpus, groups.world, device)
    if data.tokenizer is None and corpus.tokenizer_name is not None:
        data = dataclasses.replace(data, tokenizer=corpus.tokenizer_name)
    if worker.rank == 0 and (data.tokenizer is not None or data.reads_bytes):
        from parallel3d.commands.checkpoint.new_runs import KEPT_FILE  # and Hydra

        is_begun = has_source or (worker.run_dir / KEPT_FILE).exists()
        known = corpus.tokenizer, corpus.taught
        for sentence in keep_tokenizer(data, worker.run_dir, *known, is_begun=is_begun):
            print_line(sentence)
    return data, corpus


def make_trainer(
    config: Config,
    groups: ProcessGroups,
    device: torch.device,
    corpus: Corpus | Blend,
    sets: Mapping[str, Corpus],
) -> Trainer:
    """Creates the trainer with the samples of the validation sets."""
    how = config.model.seq_length, config.data, config.seed
    sources = {name: one.samples(True, *how) for name, one in sets.items()}
    name = config.data.tokenizer or (BYTE if config.data.reads_bytes else None)
    sizes = open_tokenizer(name).sizes() if sets and name is not None else None
    if sets and sizes is None and groups.rank == 0:
        print_line(
            "data.valid: no bits per byte, as the corpus does not tell where its tokenizer is; "
            "data.tokenizer=… would"
        )
    files = [file for one in sets.values() for file in one.files]
    return Trainer(
        with_style(config),
        groups,
        device,
        corpus,
        valid_sets=sources,
        token_bytes=sizes,
        valid_files=files,
    )


def log_choices(config: Config, groups: ProcessGroups, device: torch.device) -> None:
    if config.ddp.hierarchical and groups.dp_inner.size == 1:
        print_line("ddp.hierarchical=true: one level of reduction, as this placement has no two")
    if config.schedule.name == "auto":
        print_line(f"schedule=auto: {Blueprint.of(config).pipeline.why_chosen()}")
    if config.cp > 1 and config.context_parallel.style == "auto":
        seconds = style_seconds(config)
        waits = ", ".join(f"{style} {1e3 * s:.3g} ms" for style, s in seconds.items())
        chosen = with_style(config).context_parallel.style
        print_line(f"context_parallel.style=auto: {chosen}; a layer waits {waits} a micro-batch")
    if avoids_cudnn(Blueprint.of(config), device):
        print_line(
            "attention_kernel=auto: not cuDNN's, as PyTorch issue 193893 has it wrong on this GPU "
            f"with fewer than {LEAST_KV_HEADS} key-value heads"
        )


def is_over(trainer: Trainer, worker: Worker, first_step: int, length_key: str) -> bool:
    """Returns whether an earlier start has done all steps; rank 0 logs it."""
    if first_step <= trainer.length.last_step or status(worker.run_dir) != "finished":
        return False
    if worker.rank == 0:
        done = f"run={trainer.config.run} is finished: {first_step - 1} steps are done"
        print_line(f"{done}; a larger train.{length_key} continues it")
    return True


def run_steps(
    trainer: Trainer, worker: Worker, recorder: Recorder | None, checkpoints: Checkpoints
) -> None:
    """Runs steps and evaluations to the end, or until a signal stops the run (`worker.stopped`).

    `recorder` is on rank 0 alone.
    """
    settings, steps = trainer.config.train, trainer.length.last_step
    if recorder is not None:
        checkpoints.waiting = recorder.waiting
    health = Health(trainer, checkpoints, print_line)
    trainer.stop_requested = lambda: worker.stop.number is not None
    profiler = StepProfiler(trainer, worker)
    first = trainer.steps_done + 1
    # Graphs, and an accelerator's fused kernels, are compiled in the first step and the first
    # evaluation, for minutes on a GPU, while other ranks wait in a collective. The watchdog rests
    # there: a hang is left to the backend's timeout.
    may_compile = trainer.config.compile or fuses(trainer.device)
    evaluation_compiles = may_compile
    if first == 1 and trainer.evaluated_sets and settings.eval_batches != 0:
        # Before the first step there is no pace to watch.
        with resting(worker), spent(recorder, "evaluation"):
            before = evaluate(trainer, worker)
        evaluation_compiles = False
        if recorder is not None and before is not None:
            recorder.evaluation(0, *before)
    for step in range(first, steps + 1):
        worker.phase = f"train step {step}"
        worker.log.boundary("train step")
        is_profiled = step in profiler.steps
        profiler.before_step(step)
        start = time.perf_counter()
        with resting(worker, when=may_compile and step == first):
            if trainer.config.schedule.timeline and step == min(first + LATER, steps):
                result = train_drawn_step(trainer, worker.run_dir)
            else:
                result = trainer.train_step()
        if recorder is not None:
            seconds = time.perf_counter() - start
            record_step(trainer, recorder, result, seconds, is_profiled)
        profiler.after_step(step)  # after the step's line, as it prints a table
        due = settings.eval_every and step % settings.eval_every == 0
        last = step == steps
        evaluated: Evaluated | None = None
        if settings.eval_batches != 0 and (due or last):
            with resting(worker, when=evaluation_compiles), spent(recorder, "evaluation"):
                evaluated = evaluate(trainer, worker)
            evaluation_compiles = False
        if due or last or result.stop or checkpoints.is_due(step):
            worker.phase = f"looking at the data after step {step}"
            check_data(trainer, worker)  # before a metric or a checkpoint is written
        if recorder is not None and evaluated is not None:
            recorder.evaluation(step, *evaluated)
        if recorder is not None and (due or last) and isinstance(trainer.train_source, Blended):
            recorder.blend(step, trainer.train_source.read(trainer.consumed_samples))
        worker.phase = f"looking after step {step}"
        worker.log.boundary("looking")
        rollbacks = health.rollbacks
        health.after_step(result)
        if recorder is not None and health.rollbacks > rollbacks:
            recorder.rolled_back(checkpoints.saved_step)
        worker.phase = f"checkpoint after step {step}"
        with trainer.step_timer.range("checkpoint"), spent(recorder, "checkpoint"):
            checkpoints.after_step(trainer)
        if result.stop and step < steps:
            worker.stopped = True
            if trainer.config.checkpoint.every:
                with spent(recorder, "checkpoint"):
                    checkpoints.save(trainer)
            profiler.give_up(step)
            return


@contextmanager
def spent(recorder: Recorder | None, part: str) -> Iterator[None]:
    """Records the wall time of a block, for the run's goodput."""
    start = time.perf_counter()
    yield
    if recorder is not None:
        recorder.spent(part, time.perf_counter() - start)


@contextmanager
def resting(worker: Worker, when: bool = True) -> Iterator[None]:
    """Lets the watchdog rest in a block that may take long, `when` it may."""
    assert worker.watchdog is not None  # `train` has started it
    if when:
        worker.watchdog.rest()
    yield
    if when:
        worker.watchdog.go_on()


Evaluated = tuple[float | None, dict[str, float | None], dict[str, Score]]


def evaluate(trainer: Trainer, worker: Worker) -> Evaluated | None:
    """Returns the losses of held-out text, in all and by the parts of a blend, and the scores of
    the validation sets; None without either; collective."""
    if trainer.held_out is None and not trainer.evaluated_sets:
        return None
    worker.phase = f"evaluation after step {trainer.steps_done}"
    worker.log.boundary("evaluation")
    with trainer.step_timer.range("evaluation"):
        eval_loss = None if trainer.held_out is None else trainer.evaluate()
        of_parts = {part: trainer.evaluate(part) for part in trainer.held_out_parts}
        of_sets = {name: trainer.score(one) for name, one in trainer.evaluated_sets.items()}
        if trainer.config.optim.ema_decay is not None:
            with trainer.ema_weights():
                if trainer.held_out is not None:
                    of_parts[EMA] = trainer.evaluate()
                for name, one in trainer.evaluated_sets.items():
                    of_sets[f"{name}/{EMA}"] = trainer.score(one)
    return eval_loss, of_parts, of_sets


def evaluate_only(trainer: Trainer, worker: Worker, is_restored: bool) -> None:
    """Evaluates the restored checkpoint and appends the figures to EVALUATIONS; collective.

    metrics.jsonl, summary.json and checkpoints are those of the training and stay as they are.

    Raises:
        UserError: the run has no checkpoint, or nothing to evaluate.
    """
    config = trainer.config
    if not is_restored:
        raise UserError(
            f"train.eval_only=true needs a checkpoint, and run={config.run} has none: train it "
            "with checkpoint.every=… first, or give another run="
        )
    assert worker.watchdog is not None  # `train` has started it
    worker.watchdog.rest()
    found = evaluate(trainer, worker)
    if found is None:
        raise UserError(
            "train.eval_only=true has nothing to evaluate: give data.valid, as in "
            "'data.valid={web:corpora/web}', or data.valid_fraction=0.05"
        )
    check_data(trainer, worker)
    if worker.rank:
        return
    step, now = trainer.steps_done, datetime.datetime.now(datetime.UTC)
    row = evaluation_row(step, *found)
    row |= {
        "tokens": trainer.consumed_samples * config.model.seq_length,
        "time": now.isoformat(timespec="seconds"),
        "layout": layout_row(layout_of(config)),
        "eval_batches": config.train.eval_batches,
        "precision": config.precision.name,
    }
    path = worker.run_dir / EVALUATIONS
    append_line(path, row)
    reads_bytes = config.data.reads_bytes
    for sentence in evaluation_lines(reads_bytes, trainer.length.last_step, row):
        print_line(sentence)
    print_line(f"appended to {path}")


def check_data(trainer: Trainer, worker: Worker) -> None:
    """Checks that the files that the run reads are unchanged, or raises UserError."""
    assert trainer.corpus is not None
    sentences = look_at([*trainer.corpus.watched.values(), *trainer.valid_files])
    if worker.local_rank == 0:  # the others see the same files
        for sentence in sentences:
            print_line(sentence)


def record_step(
    trainer: Trainer, recorder: Recorder, result: StepResult, seconds: float, is_profiled: bool
) -> None:
    is_fp16 = trainer.config.precision.name == "fp16"
    noise = result.noise._asdict() if result.noise else None
    recorder.step(
        *result[:5],
        step_time_s=seconds,
        skipped=result.skipped,
        loss_scale=trainer.progress()["loss_scale"] if is_fp16 else None,
        times=trainer.step_timer.last,
        memory=peak_memory(trainer.device),
        noise=noise and {part: v for part, v in noise.items() if v is not None},
        imbalance=trainer.train_batches.imbalance,
        profiled=is_profiled,
    )


def leave_marker(
    trainer: Trainer, worker: Worker, recorder: Recorder | None, is_saved: bool
) -> None:
    """Logs that a signal stopped the run; for a scheduler's signal, writes `requeue`.

    The batch script looks for that file, as srun and torchrun do not pass exit codes on. A run that
    could not save is not requeued: it would start over.
    """
    if recorder is None:
        return
    step, steps = trainer.steps_done, trainer.length.last_step
    recorder.finish("stopped")
    where = f"stopped by {worker.stop.name} after step {step} of {steps}"
    if not trainer.config.checkpoint.every:
        print_line(f"{where}; nothing is saved (checkpoint.every=0)")
    elif not is_saved:
        print_line(f"{where}; its checkpoint was not written")
    else:
        print_line(f"{where}; saved: run={trainer.config.run} continues there")
        if worker.stop.requeues:
            write_json(worker.run_dir / REQUEUE, {"step": step, "signal": worker.stop.name})


def open_recorder(trainer: Trainer, worker: Worker, changed: bool) -> Recorder:
    config = trainer.config
    peak = device_peak_flops(
        trainer.device,
        config.precision.name,
        local_ranks=worker.local_world_size,
        override_tflops=config.launch.peak_tflops,
    )
    flops = flops_per_token(config.model, config.model.seq_length)
    first, name = trainer.steps_done + 1, config_files(worker.run_dir)[-1].name
    return Recorder(
        *(config, worker.run_dir, flops, peak, first),
        length=trainer.length,
        changed=changed,
        config_file=name,
        begun=process_begun(),
    )


def header_facts(
    trainer: Trainer, corpus: Corpus | Blend, sets: Mapping[str, Corpus] = {}
) -> dict[str, str]:
    config, device = trainer.config, trainer.device
    name = config.data.path or "this Python's standard library"
    if isinstance(corpus, Blend):
        name = f"a blend of {len(corpus.corpora):,} corpora"
    sizes = f"{corpus.train_tokens:,} tokens to train on, {corpus.valid_tokens:,} held out"
    threads = torch.get_num_threads()
    where = f"CPU, {threads} thread{'s' if threads > 1 else ''} a rank"
    if accelerator.is_accelerator(device):
        where = accelerator.name(device)
    source = trainer.train_source
    windows = source.windows if isinstance(source, Finite) else None
    length = length_words(config.model.seq_length, trainer.length, windows)
    facts = {"data": f"{name}: {sizes}", "length": length, "device": where}
    if sets:
        tokens = (f"{name} {one.valid_tokens:,} tokens" for name, one in sets.items())
        facts["validation"] = ", ".join(tokens)
    if not config.data.reads_bytes:
        spare = config.model.vocab_size - corpus.vocab_size
        more = f", {spare:,} of model.vocab_size={config.model.vocab_size} are padding"
        words = f"{config.data.tokenizer}: {corpus.vocab_size:,} tokens{more if spare else ''}"
        facts = {"tokenizer": words} | facts
    return facts


def save_weights(trainer: Trainer, worker: Worker, name: str) -> None:
    """Writes the full parameters if `train.save_weights` asks for it; collective."""
    if not trainer.config.train.save_weights:
        return
    worker.phase = f"saving {name}"
    parameters = trainer.full_parameters()
    if worker.rank == 0:
        from safetensors.torch import save

        # Durably: a finished run would not write them again after a power cut.
        whole = {name: parameter.contiguous() for name, parameter in parameters.items()}
        replace_durably(worker.run_dir / name, save(whole))


LARGE = 100  # times the parameters of the default model, and times its vocabulary
# What a recipe sets for its model. One of the first two at its default is enough to speak.
TELLING = ("precision.name", "optim.lr")
OTHERS = ("optim.lr_warmup_steps", "global_batch_size")


def toy_defaults(config: Config) -> str | None:
    """Returns a sentence on defaults that do not suit the model; None where nothing is to say."""
    keys, small = all_keys(), ModelConfig()
    wrong = []
    parameters = parameter_count(config.model)
    if parameters > LARGE * parameter_count(small):
        left = [name for name in TELLING + OTHERS if attrgetter(name)(config) == keys[name].default]
        if config.optim.lr_warmup_fraction > 0 and OTHERS[0] in left:
            left.remove(OTHERS[0])
        if set(TELLING) & set(left):
            wrong += [spell(name, keys[name].default) for name in left]
    if config.data.reads_bytes and config.model.vocab_size > LARGE * small.vocab_size:
        wrong.append(f"data={config.data.name} (bytes)")
    if not wrong:
        return None
    return (
        f"{config.model.name} has {si(parameters)}parameters and is trained with defaults for one "
        f"of {si(parameter_count(small)).strip()}: {', '.join(wrong)}; parallel3d recipes lists "
        "configurations for such models"
    )
