"""Records the metrics of steps, the text read from a blend, and the load of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from parallel3d.blueprint.parameters import trained_shares
from parallel3d.build import Trainer
from parallel3d.data.blend import BlendedSamples
from parallel3d.data.corpus import Blend, Corpus
from parallel3d.data.sampler import Finite, SampleSource
from parallel3d.device import accelerator
from parallel3d.host.processes import process_begun
from parallel3d.loop.rank_run import RankRun
from parallel3d.loop.step_hooks import StepHook
from parallel3d.metrics.peak import device_peak_flops, peak_memory
from parallel3d.metrics.recorder import Recorder
from parallel3d.metrics.screen import length_words
from parallel3d.metrics.units import units_of
from parallel3d.models.architecture import architecture_of
from parallel3d.run.directory import config_files
from parallel3d.run.launch import Worker
from parallel3d.trainer import StepResult


@dataclass
class StepRecords(StepHook):
    """Records every step on rank 0; `is_profiled(step)` is true for steps under the profiler."""

    run: RankRun
    is_profiled: Callable[[int], bool]

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Writes the step's metrics to metrics.jsonl, the loggers and the screen."""
        trainer, recorder = self.run.trainer, self.run.recorder
        figures = self.run.user_hooks.take()
        if recorder is None:
            return
        is_fp16 = trainer.config.precision.name == "fp16"
        recorder.step(
            result.step,
            result.loss,
            result.grad_norm,
            result.lr,
            result.tokens,
            step_time_s=seconds,
            skipped=result.skipped,
            loss_scale=trainer.progress()["loss_scale"] if is_fp16 else None,
            times=trainer.step_timer.last,
            memory=peak_memory(trainer.device),
            imbalance=trainer.train_batches.imbalance,
            terms=result.terms,
            experts=result.experts and result.experts.row(),
            profiled=self.is_profiled(result.step),
            hooks=figures or None,
        )


@dataclass
class BlendRecords(StepHook):
    """Records how much text was read from each part of a blend."""

    run: RankRun

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Writes a line when an evaluation is due."""
        trainer, recorder = self.run.trainer, self.run.recorder
        if recorder is None or not self.run.evaluates_after(result.step):
            return
        if isinstance(trainer.samples.train, BlendedSamples):
            recorder.blend(result.step, trainer.samples.train.read(trainer.consumed_samples))


@dataclass
class ExpertRecords(StepHook):
    """Records how many tokens each expert gets."""

    run: RankRun

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Writes a line when an evaluation is due."""
        recorder, experts = self.run.recorder, result.experts
        if recorder is None or experts is None or not self.run.evaluates_after(result.step):
            return
        recorder.expert_counts(result.step, experts.counts)


def open_recorder(trainer: Trainer, worker: Worker, changed: bool, loaded: float) -> Recorder:
    """Opens the recorder of rank 0.

    `changed` says whether keys differ from those of the checkpoint, and `loaded` is the Unix time
    at which it was there.
    """
    config = trainer.config
    peak = device_peak_flops(
        trainer.device,
        config.precision.name,
        local_ranks=worker.local_world_size,
        override_tflops=config.launch.peak_tflops,
    )
    shares = trained_shares(config.model, config.optim)
    example = partial(trainer.train_batches.micro_batch, trainer.consumed_samples, 0)
    flops, formula = architecture_of(config.model).flops_per_token(config.model, shares, example)
    return Recorder(
        config,
        worker.run_dir,
        flops,
        peak,
        first_step=trainer.steps_done + 1,
        length=trainer.length,
        changed=changed,
        config_file=config_files(worker.run_dir)[-1].name,
        begun=process_begun(),
        loaded=loaded,
        flops_formula=formula,
    )


def header_facts(trainer: Trainer, of_samples: Mapping[str, str]) -> dict[str, str]:
    """Returns the header's texts by label: those of the samples, the length and the device."""
    config, device = trainer.config, trainer.device
    threads = torch.get_num_threads()
    where = f"CPU, {threads} thread{'s' if threads > 1 else ''} a rank"
    if accelerator.is_accelerator(device):
        where = accelerator.name(device)
    source = trainer.samples.train
    windows = source.windows if isinstance(source, Finite) else None
    units = units_of(config.model)
    length = length_words(config.model.seq_length, trainer.length, windows, units)
    facts = {**of_samples, "length": length, "device": where}
    if "validation" in facts:
        facts["validation"] = facts.pop("validation")  # as the last line
    return facts


def facts_of_samples(train: SampleSource, valid: SampleSource | None) -> dict[str, str]:
    """Returns the header's line about the samples of a script."""
    words = []
    for source in (train, valid):
        if source is not None:
            many = f", {source.windows:,} samples" if isinstance(source, Finite) else ""
            words.append(type(source).__name__ + many)
    return {"data": "the script's own: " + "; held out: ".join(words)}


def facts_of_text(
    trainer: Trainer, corpus: Corpus | Blend, sets: Mapping[str, Corpus] = {}
) -> dict[str, str]:
    """Returns the header's texts about a text by label: tokenizer, data and validation sets."""
    config = trainer.config
    name = config.data.path or "this Python's standard library"
    if isinstance(corpus, Blend):
        name = f"a blend of {len(corpus.corpora):,} corpora"
    sizes = f"{corpus.train_tokens:,} tokens to train on, {corpus.valid_tokens:,} held out"
    facts = {"data": f"{name}: {sizes}"}
    if sets:
        tokens = (f"{name} {one.valid_tokens:,} tokens" for name, one in sets.items())
        facts["validation"] = ", ".join(tokens)
    if not config.data.reads_bytes:
        spare = config.model.vocab_size - corpus.vocab_size
        more = f", {spare:,} of model.vocab_size={config.model.vocab_size} are padding"
        words = f"{config.data.tokenizer}: {corpus.vocab_size:,} tokens{more if spare else ''}"
        facts = {"tokenizer": words} | facts
    return facts
