"""Runs the steps of one rank, each from forward to optimizer.

Nothing here knows the configuration: `build.Trainer` builds a rank's parts from it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group
from parallel3d.comm.operation_log import blocking
from parallel3d.comm.step_timer import StepTimer
from parallel3d.config.length import PlannedLength, clock_of
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data.loader import Batches, MicroBatch, OwnMicroBatch
from parallel3d.data.sampler import Finite, FirstSamples, SampleSource, has_loss_mask
from parallel3d.data_parallel.interface import DataParallel
from parallel3d.device import accelerator
from parallel3d.device.precision import LossScale, compute_dtype
from parallel3d.errors import UserError
from parallel3d.experts.balance import BalanceOfRun, ExpertFigures
from parallel3d.optim.optimizer import Optimizer, learning_rate
from parallel3d.optim.thaws import THAWS, thaws_of
from parallel3d.parameters.gather import gather_parameters
from parallel3d.parameters.slices import (
    ParameterSlice,
    constant_slices,
    parameter_slices,
    state_slice,
    with_averages,
)
from parallel3d.pipeline.executor import Executor
from parallel3d.schedules.check import check
from parallel3d.schedules.schedule import Schedule
from parallel3d.tensor_parallel.partial_gradients import (
    all_reduce_embedding_grads,
    all_reduce_layernorm_grads,
    all_reduce_shared_kv_grads,
)

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups

log = logging.getLogger(__name__)

Value = TypeVar("Value")


SAVE = 2.0**32  # above the number of ranks; sums of these are exact in float64


class StepSums(NamedTuple, Generic[Value]):
    """The quantities of a step that are summed over the world.

    The values are either this rank's shares, as tensors on its device, or the totals, as lists on
    the host. All sums travel in one all-reduce, so that the host waits once. A further quantity
    only needs a further field, with any number of elements.

    Attributes:
        loss, tokens: the sum of the losses and the number of unmasked tokens
            (`Trainer.share_of_loss`), or of the items that the loss has counted (`CountedLoss`).
        squared_norm: the squared norm of the gradients, which still contain the loss scale.
        asked: the number of ranks that were asked to end the run, and SAVE for each rank that asks
            for a checkpoint. Both are in one element, so that the rounding of the other sums, which
            may depend on their places, does not depend on whether checkpoints are saved by time.
        experts: the sums of the layers with experts (`BalanceOfRun.take`); empty without experts.
        terms: the sums of the named terms of a loss that counts its items; empty for other losses.
    """

    loss: Value
    tokens: Value
    squared_norm: Value
    asked: Value
    experts: Value
    terms: Value


def total_sums(shares: StepSums[Tensor], world: Group) -> StepSums[list[float]]:
    """Sums shares, float64 tensors, over all ranks, and returns the totals; collective."""
    sums = torch.cat([share.reshape(-1) for share in shares])
    collectives.all_reduce_few(sums, world)
    with blocking(world):
        values = iter(sums.tolist())
    return StepSums(*([*itertools.islice(values, share.numel())] for share in shares))


# What the losses of a rank have counted in a step (`models.own_loss.LossSums`): the number of items
# and the sums of the named terms.
Counted = tuple[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True)
class LossShares:
    """This rank's shares of the sums of a loss, float64 tensors (`StepSums`)."""

    loss: Tensor
    count: Tensor
    terms: Tensor


def check_count(count: float) -> None:
    """Raises UserError if the count of a whole step is no number of items."""
    if not (math.isfinite(count) and count >= 0):
        raise UserError(
            f"the counts of p3d.Loss add up to {count:g} in this step, but count must be a number "
            "of items: 0 or more, and finite"
        )


class StepTotals(NamedTuple):
    """The results of a step on which all ranks agree.

    Attributes:
        loss: the mean loss; None if there is nothing to learn.
        grad_norm: the gradient norm without the loss scale.
        divisor: the factor by which the gradients are still multiplied beside the loss scale; 1
            unless the loss counts its items.
        stop: whether the run is to stop.
        save: whether the time for a checkpoint has come.
        experts: the figures of the experts; None without experts.
        terms: the means of the named terms of the loss.
    """

    loss: float | None
    grad_norm: float
    divisor: float
    stop: bool
    save: bool
    experts: ExpertFigures | None
    terms: Mapping[str, float]


class Score(NamedTuple):
    """Score of a validation set.

    Attributes:
        nats: sum of the tokens' cross-entropies, or of the losses of a user's own loss.
        tokens: number of tokens with a loss, or of the items that an own loss has counted.
        bytes: number of bytes of these tokens' text; None if the tokenizer is unknown.
        terms: the means of the named terms of an own loss; None for the loss of our transformer.
    """

    nats: float
    tokens: float
    bytes: int | None = None
    terms: Mapping[str, float] | None = None

    @property
    def loss(self) -> float | None:
        """Returns the loss in nats per token, or None without a token to predict."""
        return self.nats / self.tokens if self.tokens else None

    @property
    def perplexity(self) -> float | None:
        try:
            return None if self.loss is None else math.exp(self.loss)
        except OverflowError:
            return math.inf

    def row(self) -> dict[str, Any]:
        """Returns the recorded figures: loss, perplexity, bits_per_byte, tokens.

        An own loss need not be that of a text, so it has no perplexity, and its items are `count`.
        """
        if self.terms is not None:
            own = {"loss": self.loss, "count": self.tokens}
            return own | ({"terms": self.terms} if self.terms else {})
        bits = self.nats / math.log(2) / self.bytes if self.bytes else None
        figures = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": bits}
        return figures | {"tokens": self.tokens}


class EvaluatedSet(NamedTuple):
    """A set of samples to evaluate; `samples` is their number, or None for an endless source."""

    batches: Batches
    samples: int | None


class StepResult(NamedTuple):
    """The result of an optimizer step, equal on every rank.

    Attributes:
        step: the number of the step, from 1 on.
        loss: the mean over the unmasked tokens of the global batch, in nats; None if all tokens are
            masked.
        grad_norm: the norm of the gradients before clipping.
        lr: the learning rate.
        tokens: the number of tokens read, including masked ones.
        skipped: whether the parameters are unchanged, because the loss or a gradient was not finite
            or there is no loss.
        stop: whether a rank was asked to end the run (`stop_requested`).
        save: whether the time for a checkpoint has come (`save_requested`).
        experts: the load and balance of the layers with experts; None without experts.
        terms: the means of the named terms of a user's own loss (`Loss.terms`).
    """

    step: int
    loss: float | None
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool = False
    stop: bool = False
    experts: ExpertFigures | None = None
    terms: Mapping[str, float] = {}
    save: bool = False


@dataclass(frozen=True)
class RankParts:
    """The objects that the steps of a rank use; `build.build` makes them.

    Attributes:
        executor: runs the forwards and backwards of the stages, and exchanges their messages.
        data_parallel: sums gradients over the replicas, and holds the parameters.
        balance: balances the load of the experts; None for a model without experts.
        tied_name: the name of the embedding table if it is trained and another rank holds a copy
            of it; otherwise None.
        needs_batch: whether a stage of this rank reads samples.
        has_loss: whether the last stage of this rank computes the loss.
        sums_replicated, split, measures: as in `Architecture`.
        counts_loss: whether the loss counts its items itself, as that of a user's own model, and
            samples are of any form.
        take_sums: returns and clears what the losses of the last stage have counted; None if they
            do not count, or this rank does not compute the loss.
    """

    executor: Executor
    data_parallel: DataParallel
    optimizer: Optimizer
    balance: BalanceOfRun | None
    tied_name: str | None
    needs_batch: bool
    has_loss: bool
    sums_replicated: bool
    split: SequenceSplit | None
    measures: bool
    counts_loss: bool = False
    take_sums: Callable[[], Counted] | None = None


@dataclass(frozen=True)
class StepSamples:
    """The samples of a run.

    Attributes:
        train: the training samples.
        checks_tokens: whether tokens may be outside the vocabulary, as in a user's own source.
        is_own: whether the samples come from a user's own source, which is not read ahead.
        document_mask: whether tokens attend only to their own document.
        held_out: the held-out samples, or None.
        held_out_parts: the held-out samples of each part of a blend, by name.
        valid_sets: the samples of the validation sets by name; a source with `windows` (`Finite`)
            has that many samples, and any other source is endless.
        token_bytes: (vocabulary,), the number of bytes in each token's text, for `Score`; None if
            it is unknown.
        eval_batches: `train.eval_batches`.
    """

    train: SampleSource
    checks_tokens: bool
    is_own: bool
    document_mask: bool
    held_out: SampleSource | None
    held_out_parts: Mapping[str, SampleSource]
    valid_sets: Mapping[str, SampleSource]
    token_bytes: npt.NDArray[np.int64] | None
    eval_batches: int | None


class RankTrainer:
    """Runs the steps of one rank; `build.Trainer` makes it of a configuration.

    Args:
        blueprint: what the ranks of the run share.
        parts: the objects that a step uses, built from the blueprint.
        samples: the samples of the run.
        planned_length: the length of the run, if it is new.
        groups: the process groups of this rank, whose collectives `step_timer` times.
        device: the device of this rank.
        step_timer: times the parts of a step.
        stop_requested: returns whether this rank was asked to end the run; called in every step.
        save_requested: returns whether this rank asks for a checkpoint; called in every step. All
            ranks save after the same step (`StepResult.save`), whatever their clocks say.

    Attributes:
        copied: an event that is cleared while a checkpoint in progress copies the parameters, which
            must not change until then.
        names_of_terms: the names of an own loss's terms, by whether the step trains; they are
            exchanged in the first step and in the first evaluation (`_terms_of_ranks`).
    """

    def __init__(
        self,
        blueprint: Blueprint,
        parts: RankParts,
        samples: StepSamples,
        planned_length: PlannedLength,
        groups: ProcessGroups,
        device: torch.device,
        step_timer: StepTimer,
        stop_requested: Callable[[], bool],
        save_requested: Callable[[], bool],
    ) -> None:
        self.blueprint = blueprint
        self.groups = groups
        self.device = device
        self.step_timer = step_timer
        self.dtype = compute_dtype(blueprint.precision)
        self.loss_scale = LossScale(blueprint.precision)
        self.use(blueprint.pipeline.schedule())
        self.tied_name = parts.tied_name
        self.data_parallel = parts.data_parallel
        self.parameters = parts.data_parallel.parameters
        self.optimizer = parts.optimizer
        self.executor = parts.executor
        self.needs_batch = parts.needs_batch
        self.has_loss = parts.has_loss
        self.sums_replicated = parts.sums_replicated
        self.split = parts.split
        self.measures = parts.measures
        self.counts_loss = parts.counts_loss
        self.take_sums = parts.take_sums
        self.names_of_terms: dict[bool, list[str]] = {}
        self.balance = parts.balance
        self.planned_length = planned_length
        self.length = planned_length.after()
        self.use_samples(samples)
        self.steps_done = 0
        self.consumed_samples = 0
        self.batch = blueprint.global_batch_size  # after a step, the global batch of that step
        self.stop_requested = stop_requested
        self.save_requested = save_requested
        self.copied = threading.Event()
        self.copied.set()

    def use(self, schedule: Schedule) -> None:
        """Checks a pipeline schedule, and uses it for training and evaluation."""
        program, rank = schedule.program(), self.groups.pp.index
        check(program, schedule.microbatches, schedule.assignment)
        self.schedule = schedule
        self.program = program[rank]
        self.forwards = schedule.forwards()[rank]

    def use_samples(self, samples: StepSamples) -> None:
        """Trains and evaluates with these samples from now on."""
        self.samples = samples
        self.train_batches = self._batches(samples.train, ahead=not samples.is_own)
        self.held_out = None if samples.held_out is None else self._evaluated(samples.held_out)
        parts, sets = samples.held_out_parts.items(), samples.valid_sets.items()
        self.held_out_parts = {name: self._evaluated(part) for name, part in parts}
        self.evaluated_sets = {name: self._evaluated(source) for name, source in sets}

    def _evaluated(self, source: SampleSource) -> EvaluatedSet:
        if not isinstance(source, Finite):
            return EvaluatedSet(self._batches(source), None)
        samples = source.windows
        if self.counts_loss and not has_loss_mask(source.sample(0)):
            samples = self._whole_batches(samples)
        return EvaluatedSet(self._batches(FirstSamples(source, samples)), samples)

    def _whole_batches(self, samples: int) -> int:
        """Returns how many of these samples fill whole global batches; raises UserError for none.

        The last batch could only be filled up by samples that add nothing to the loss.
        """
        size = self.blueprint.global_batch_size
        if samples < size:
            raise UserError(
                f"fit(valid=…) has {samples} samples without a field loss_mask, but an evaluation "
                f"needs a whole batch of global_batch_size={size}; give at least {size} samples, "
                "or a field loss_mask, which is zero in the samples that fill up the last batch"
            )
        return samples // size * size

    def _batches(self, source: SampleSource, ahead: bool = False) -> Batches:
        blueprint, model = self.blueprint, self.blueprint.model
        return Batches(
            source,
            blueprint.micro_batch_size,
            blueprint.microbatches,
            self.groups.dp.index,
            self.device,
            needs_batch=self.needs_batch,
            document_mask=self.samples.document_mask,
            stride=blueprint.global_batch_size if ahead else 0,
            split=self.split,
            vocab_size=model.vocab_size if self.samples.checks_tokens else None,
            routes=self.balance is not None and bool(self.balance.routers),
            measures=self.measures,
            fields_in=self.dtype if self.counts_loss else None,
        )

    @property
    def tokens_per_step(self) -> int:
        """Returns the number of tokens read in the last step."""
        return self.batch * self.blueprint.model.seq_length

    def _resize(self) -> None:
        """Switches to the global batch that `train.batch_schedule` gives the next step.

        Evaluations still use `global_batch_size`.
        """
        blueprint, batch = self.blueprint, self.planned_length.sizes.at(self.consumed_samples)
        if batch == self.batch:
            return
        if (operations := self.groups.world.log) is not None:
            operations.forget()
        count = batch // (blueprint.micro_batch_size * blueprint.layout.dp)
        forwards = self.forwards
        self.use(self.blueprint.pipeline.schedule(count))
        self.batch = batch
        self.forwards = forwards
        self.train_batches.resize(count, batch)

    def _allow_other_operations(self) -> None:
        """Tells the operations' log that all ranks have agreed on the rest of this step."""
        world = self.groups.world
        if world.log is not None:
            world.log.allow_others(world)

    def train_step(self) -> StepResult:
        """Runs one optimizer step on the next global batch; collective over the world.

        If the loss or the gradients are not finite on some rank, or all tokens of the batch are
        masked, the parameters and the optimizer stay unchanged on all ranks.
        """
        self.step_timer.start_step()
        self._resize()
        result = self._train_step()
        self.step_timer.end_step()
        return result

    def _train_step(self) -> StepResult:
        step, first = self.steps_done, self.consumed_samples
        with self.step_timer.range("clear gradients"):
            self.data_parallel.start_step(self.schedule.microbatches)
        tokens = None
        if not self.counts_loss:
            tokens = self.global_tokens(self.train_batches, first)
        loss_sum = self.executor.train_step(
            self.program,
            self._loader(first),
            self.provisional_scale() if tokens is None else self.gradient_scale(tokens),
            self.data_parallel.start_last_microbatch,
        )
        unused = self.data_parallel.finish_step()
        if unused and step == 0:
            log.warning("no gradient reached %s", ", ".join(unused))
        with self.step_timer.range("partial sums"):
            if self.sums_replicated:
                all_reduce_layernorm_grads(self.data_parallel.segments, self.groups.tp)
            all_reduce_shared_kv_grads(self.data_parallel.segments, self.groups.tp)
            if self.tied_name is not None:
                table = self.data_parallel.tied_gradient(self.tied_name)
                all_reduce_embedding_grads(table, self.groups.embedding)
        with self.step_timer.range("grad norm"):
            shares = self._shares(loss_sum, tokens, is_training=True)
            loss, grad_norm, divisor, stop, save, experts, terms = self._agree(shares)
        lr = learning_rate(self.blueprint.optim, self.length.end, self.length.place(step + 1))
        finite = loss is not None and math.isfinite(loss + grad_norm)
        self.copied.wait()
        if finite:
            with self.step_timer.range("optimizer"):
                self.optimizer.step(lr, grad_norm, self.loss_scale.scale * divisor)
            self.data_parallel.all_gather_params()
            if self.balance is not None and experts is not None:
                self.balance.update(experts)
        else:
            self._allow_other_operations()  # the parameters are not gathered
        if loss is not None:
            self.loss_scale.update(overflow=not finite)
        self.steps_done = step + 1
        self.consumed_samples += self.batch
        return StepResult(
            step=step + 1,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=self.tokens_per_step,
            skipped=not finite,
            stop=stop,
            experts=experts,
            terms=terms,
            save=save,
        )

    def _loader(self, first: int) -> Callable[[int], MicroBatch | OwnMicroBatch]:
        """Returns a function that loads a micro-batch of the step that begins at sample `first`."""
        load = functools.partial(self.train_batches.micro_batch, first)
        balance = self.balance
        if balance is None or not balance.routers:
            return load
        routed = torch.zeros((), dtype=torch.float64, device=self.device)
        if balance.needs_routed_tokens:
            routed += self.train_batches.routed_count(first)
            collectives.all_reduce_few(routed, self.groups.dp)

        def load_scaled(m: int) -> MicroBatch:
            batch = load(m)
            assert isinstance(batch, MicroBatch)
            counted = batch.inputs.balance
            assert counted is not None  # always set on ranks with routers
            scaled = balance.scaled(counted, self.loss_scale.scale, self.batch, routed)
            return batch._replace(inputs=replace(batch.inputs, balance=scaled))

        return load_scaled

    def evaluate(self, part: str | None = None) -> float | None:
        """Returns the mean loss of the held-out samples (see `score`); collective.

        Returns None if all tokens are masked. `part` names one of `held_out_parts`, the parts of a
        blend; None selects the whole held-out text.
        """
        chosen = self.held_out if part is None else self.held_out_parts[part]
        assert chosen is not None  # callers check that there are held-out samples
        return self.score(chosen).loss

    def score(self, of: EvaluatedSet) -> Score:
        """Evaluates the first `train.eval_batches` global batches of a set; collective.

        A set with fewer samples is evaluated once as a whole.
        """
        size, most = self.blueprint.global_batch_size, self.samples.eval_batches
        end = of.samples if most is None else most * size
        if end is None:
            raise ValueError(
                "train.eval_batches=null evaluates whole sets, so the source needs `windows`, its "
                "number of samples"
            )
        if of.samples is not None:
            end = min(end, of.samples)
        total = torch.zeros(3, dtype=torch.float64, device=self.device)
        terms: Tensor | None = None
        # Several ranks read the same samples; only the first of them counts their bytes.
        is_first = self.groups.tp.index == self.groups.cp.index == 0
        self.data_parallel.wait_for_all_gathers()
        for first in range(0, end, size):
            tokens = None if self.counts_loss else self.global_tokens(of.batches, first)
            load = functools.partial(of.batches.micro_batch, first)
            loss_sum = self.executor.evaluate(self.forwards, load)
            shares = self._shares(loss_sum, tokens, is_training=False)
            total[0] += shares.loss
            total[1] += shares.count
            terms = shares.terms if terms is None else terms + shares.terms
            if self.counts_loss:
                continue
            if self.samples.token_bytes is not None and self.has_loss and is_first:
                total[2] += of.batches.byte_count(first, self.samples.token_bytes)
        if terms is not None:
            total = torch.cat((total, terms))
        collectives.all_reduce(total, self.groups.world)
        with blocking(self.groups.world):
            nats, count, size_in_bytes, *sums = total.tolist()
        if self.counts_loss:
            check_count(count)
            count = int(count) if count.is_integer() else count
            return Score(nats, count, terms=self._means(sums, count, is_training=False))
        text = None if self.samples.token_bytes is None else int(size_in_bytes)
        return Score(nats, int(count), text)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Replaces weights with their moving average (`optim.ema_decay`) in a block; collective.

        After the block, all weights have exactly their previous values.
        """
        self._swap_ema()
        yield  # an exception in the block ends the run, so the weights need not be swapped back
        self._swap_ema()

    def _swap_ema(self) -> None:
        self.copied.wait()  # a checkpoint in progress may still copy the weights
        self.data_parallel.wait_for_all_gathers()  # which also write to this rank's own shard
        self.optimizer.swap_ema()
        self.data_parallel.all_gather_params()

    def global_tokens(self, batches: Batches, first: int) -> Tensor:
        """Returns the number of unmasked tokens in a global batch, in float64; collective over dp.

        The number is zero on ranks that do not compute the loss.
        """
        count = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.has_loss:
            with self.step_timer.within("data"):
                count += batches.token_count(first)
            collectives.all_reduce_few(count, self.groups.dp)
        return count

    def gradient_scale(self, tokens: Tensor) -> Tensor:
        """Returns the factor by which a step's gradients are multiplied.

        The factor is the loss scale divided by the number of unmasked `tokens` in the global batch,
        so that summing gradients over micro-batches and ranks gives the gradient of the mean loss.
        """
        return self.loss_scale.scale / tokens.clamp(min=1.0)

    def provisional_scale(self) -> Tensor:
        """Returns the factor by which gradients are multiplied before their loss's count is known.

        The factor is the loss scale divided by `_presumed_count`.
        """
        # A kernel fills the tensor, because copying a number to the device would block the host.
        scale = self.loss_scale.scale / self._presumed_count
        return torch.full((), scale, dtype=torch.float64, device=self.device)

    @property
    def _presumed_count(self) -> float:
        """Returns about the number of items of a step: the power of two nearest to its tokens.

        A power of two rounds no gradient, and the optimizer divides by the rest.
        """
        return 2.0 ** round(math.log2(self.tokens_per_step))

    def _shares(self, loss_sum: Tensor, tokens: Tensor | None, is_training: bool) -> LossShares:
        """Returns this rank's shares of a loss; collective if the loss counts its items.

        `tokens` is the number of unmasked tokens in the global batch, or None for such a loss.
        """
        if tokens is not None:
            loss, count = self.share_of_loss(loss_sum, tokens)
            return LossShares(loss, count, loss_sum.new_empty(0))
        counted = None if self.take_sums is None else self.take_sums()
        names = self._terms_of_ranks(None if counted is None else counted[1], is_training)
        if counted is None or self.groups.tp.index:
            # All tensor-parallel ranks hold the same loss, so only the first contributes it.
            none = torch.zeros(2 + len(names), dtype=torch.float64, device=self.device)
            return LossShares(none[0], none[1], none[2:])
        items, sums = counted
        terms = [sums[name] for name in names]
        return LossShares(loss_sum, items, torch.stack(terms) if terms else loss_sum.new_empty(0))

    def _terms_of_ranks(self, mine: Mapping[str, Tensor] | None, is_training: bool) -> list[str]:
        """Returns the names of the loss's terms; the first call of each kind is collective.

        `mine` are those of this rank, or None if it does not compute the loss. Raises UserError on
        every rank if two ranks have other terms.
        """
        if is_training not in self.names_of_terms:
            own = None if mine is None else sorted(mine)
            everyone = [own or []]
            if accelerator.has_values(self.device):  # a dry run has no other ranks
                everyone = all_gather_json(own, self.groups.world.handle, self.device)
            found = [(rank, names) for rank, names in enumerate(everyone) if names is not None]
            first, names = found[0]
            for rank, others in found:
                if others != names:
                    raise UserError(
                        f"the loss returned the terms ({', '.join(others)}) on rank {rank} and "
                        f"({', '.join(names)}) on rank {first}; return the same names on every "
                        "rank, with the sum 0 for a term without items"
                    )
            self.names_of_terms[is_training] = names
        return self.names_of_terms[is_training]

    def _means(self, sums: Sequence[float], count: float, is_training: bool) -> dict[str, float]:
        """Returns the means of the loss's terms by name; without items there is none."""
        if not count or is_training not in self.names_of_terms:
            return {}
        names = self.names_of_terms[is_training]
        return {name: total / count for name, total in zip(names, sums, strict=True)}

    def share_of_loss(self, loss_sum: Tensor, tokens: Tensor) -> Tensor:
        """Returns this rank's share of the sum of losses and of the tokens in the global batch.

        All tensor-parallel ranks hold the same loss, so only the first contributes it. The token
        count is already that of the whole global batch, so only one rank contributes it.
        """
        groups = self.groups
        contributes = self.has_loss and groups.tp.index == 0
        return torch.stack(
            (loss_sum * contributes, tokens * (contributes and groups.dp_cp.index == 0))
        )

    def _agree(self, shares: LossShares) -> StepTotals:
        """Sums the results of a step over the world; collective."""
        squared = self.share_of_norm()
        sums = StepSums(
            loss=shares.loss,
            tokens=shares.count,
            squared_norm=squared,
            # A kernel fills the tensor, because copying a number would block the host.
            asked=torch.full_like(squared, self.stop_requested() + SAVE * self.save_requested()),
            experts=squared.new_empty(0) if self.balance is None else self.balance.take(squared),
            terms=shares.terms,
        )
        totals = total_sums(sums, self.groups.world)
        (square,) = totals.squared_norm
        if not math.isfinite(square) and self.blueprint.optim.clip_grad > 0:
            # The squares of gradients above 1e19 overflow in fp32, although clipping would make the
            # gradients ordinary. Without clipping, AdamW's own squares would overflow too.
            share = self.share_of_norm(torch.float64)
            self._allow_other_operations()
            collectives.all_reduce_few(share, self.groups.world)
            with blocking(self.groups.world):
                square = share.item()
        (loss,), (count,), (asked,) = totals.loss, totals.tokens, totals.asked
        saves, stops = divmod(asked, SAVE)
        mean = loss / count if count else None
        divisor, terms = 1.0, {}
        if self.counts_loss:
            check_count(count)
            divisor = (count or 1.0) / self._presumed_count
            terms = self._means(totals.terms, count, is_training=True)
        experts = None
        if self.balance is not None:
            experts = self.balance.figures(totals.experts, self.batch)
        norm = self.loss_scale.unscaled(square**0.5, divisor)
        return StepTotals(mean, norm, divisor, stops > 0, saves > 0, experts, terms)

    def share_of_norm(self, summed_in: torch.dtype | None = None) -> Tensor:
        """Returns this rank's share of the squared gradient norm, in float64.

        Squares are summed in the dtype `summed_in`; see `Optimizer.squared_norm` for None.
        """
        if not self.optimizer.segments:  # all is frozen here; a zero from the host would block it
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return self.optimizer.squared_norm(summed_in).to(self.device)

    def parameter_slices(self) -> list[ParameterSlice]:
        """Returns this rank's slices of all tensors that a checkpoint restores."""
        states = {} if self.balance is None else self.balance.states
        return [
            *parameter_slices(self.optimizer.groups),
            *constant_slices(self.data_parallel.constants),
            *(state_slice(name, values, self.groups) for name, values in states.items()),
        ]

    def saved_slices(self) -> list[ParameterSlice]:
        """Returns this rank's slices of all tensors that it writes to a checkpoint.

        With `optim.ema_decay`, these include averages of frozen parameters.
        """
        slices = self.parameter_slices()
        return slices if self.blueprint.optim.ema_decay is None else with_averages(slices)

    def progress(self) -> dict[str, Any]:
        return {
            "steps": self.steps_done,
            "consumed_samples": self.consumed_samples,
            "clock": self.length.clock_at(self.steps_done, self.consumed_samples),
            "updates": self.optimizer.updates,
            **({THAWS: self.optimizer.thaws} if self.optimizer.thaws else {}),
            **self.optimizer.progress(),
            **self.loss_scale.progress(),
        }

    def restore(self, progress: Mapping[str, Any], there: Mapping[str, Any] = {}) -> None:
        """Continues from `progress`, once the caller has overwritten the `parameter_slices`.

        `there` is the configuration saved with `progress`, or empty if it is unknown.
        """
        self.steps_done = int(progress["steps"])
        self.consumed_samples = int(progress["consumed_samples"])
        clock = clock_of(progress, there)
        self.length = self.planned_length.after(self.steps_done, self.consumed_samples, clock)
        thaws = thaws_of(progress, there, self.blueprint.optim)
        self.optimizer.restore(int(progress["updates"]), thaws, progress)
        self.loss_scale.restore(progress)
        self.data_parallel.all_gather_params()
        self.data_parallel.wait_for_all_gathers()

    def step_times(self) -> list[dict[str, Any]]:
        """Returns the coordinates and the mean times per step of every rank; collective."""
        times = self.step_timer.means()
        place = self.groups.layout.coordinates(self.groups.rank)
        row = {"rank": self.groups.rank, **place._asdict(), **times, "step": sum(times.values())}
        return all_gather_json(row, self.groups.world.handle, self.device)

    def full_parameters(self) -> dict[str, Tensor]:
        """Returns the full tensors by name on rank 0's CPU, and {} on other ranks; collective."""
        self.data_parallel.wait_for_all_gathers()
        return gather_parameters(self.parameters.values(), self.groups)
