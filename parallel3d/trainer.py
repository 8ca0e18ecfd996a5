"""The training step, readable from top to bottom: every arrow of the house on one page.

config → layout → groups → this stage's layers, sharded → plan → forward and backward per
micro-batch → buckets reduced → partial and tied gradients added → norm, clip → step.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d import collectives
from parallel3d.checkpoint.gather import gather_parameters
from parallel3d.config import Config
from parallel3d.config_checks import check_config
from parallel3d.data.batches import Batches, SampleSource
from parallel3d.data.corpus import Corpus
from parallel3d.data.sampler import Sampler
from parallel3d.data_parallel.buckets import build_buckets
from parallel3d.data_parallel.hierarchical import TwoLevels
from parallel3d.data_parallel.reducer import Reducer
from parallel3d.models.transformer import BuildContext, Stage
from parallel3d.optim.lr_schedule import learning_rate
from parallel3d.optim.optimizer import Optimizer, sum_partial_gradients, sum_tied_gradients
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.mailbox import Mailboxes
from parallel3d.pipeline.schedule import schedule
from parallel3d.pipeline.split import layers_of_stages
from parallel3d.tensor_parallel.parameters import Initializer
from parallel3d.topology.process_groups import ProcessGroups

log = logging.getLogger(__name__)

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


class TrainingFailure(RuntimeError):
    """The run cannot go on, on all ranks alike."""


class StepResult(NamedTuple):
    """One optimizer step, the same on every rank.

    loss: mean over the unmasked tokens of the global batch, in nats. grad_norm: before clipping.
    tokens: tokens read, masked ones included. skipped: the gradients were not finite, and the
    parameters stay as they were.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool = False


@dataclass
class Trainer:
    """Trains one rank's part of the model.

    Args:
        config: a whole configuration; it is checked here too, so that a library user gets the same
            refusals as the command line.
        groups: this rank's process groups.
        corpus: where training and held-out samples come from.
        train_source, valid_source: samples to use instead of a corpus.

    Raises:
        UserError: a configuration that cannot work.
    """

    config: Config
    groups: ProcessGroups
    device: torch.device
    corpus: Corpus | None = None
    train_source: SampleSource | None = None
    valid_source: SampleSource | None = None

    def __post_init__(self) -> None:
        own_samples = self.train_source is not None
        config = check_config(self.config, self.groups.layout.world_size, own_samples=own_samples)
        self.config, groups, model = config, self.groups, config.model
        self.dtype = DTYPES[config.precision.name]
        self.steps_done = 0
        self.consumed_samples = 0

        initializer = Initializer(config.seed, self.dtype, self.device)
        context = BuildContext(initializer, groups.tp, config.sp)
        layers = layers_of_stages(config)[groups.pp.index]
        first, last = groups.is_first_stage, groups.is_last_stage
        self.stage = Stage(model, layers, first, last, context)
        self.parameters = dict(self.stage.named_parameters())
        grad_dtype = torch.promote_types(self.dtype, torch.float32)
        self.buckets = build_buckets(
            list(self.parameters.items()), config.ddp.bucket_cap_mb, grad_dtype
        )
        hook = collectives.all_reduce_bucket
        if groups.dp_inner.size > 1:
            hook = TwoLevels(groups.dp_inner, groups.dp_outer)
        self.reducer = Reducer(self.buckets, groups.dp, config.ddp.overlap, hook)
        if config.compile:
            self.stage.compile_blocks()
        self.optimizer = Optimizer(config.optim, self.buckets, groups.tp, groups.model)

        sequence = model.seq_length // (groups.tp.size if config.sp else 1)
        hidden_shape = (config.micro_batch_size, sequence, model.hidden_size)
        boxes = None
        on_cpu = self.device.type == "cpu"
        if groups.pp.size > 1 and on_cpu and config.launch.shared_memory:
            timeout_s = config.launch.timeout_s
            boxes = Mailboxes.open(groups.pp.handle, groups.pp.index, groups.pp.size, timeout_s)
        self.executor = Executor(
            self.stage, groups.pp, hidden_shape, self.dtype, self.device, boxes
        )
        stages, microbatches = groups.pp.size, config.num_microbatches
        self.plan = schedule(config.schedule.name, stages, microbatches)[groups.pp.index]
        self._open_data()

    def _open_data(self) -> None:
        config, corpus = self.config, self.corpus
        if corpus is not None:
            common = (corpus.eot, config.data.eod_mask_loss)
            length, seed = config.model.seq_length, config.seed
            self.train_source = Sampler(corpus.train, length, seed, True, *common)
            self.valid_source = Sampler(corpus.valid, length, seed, False, *common)
        if self.train_source is None:
            raise ValueError("a Trainer needs a corpus or a train_source")
        self.train_batches = self._batches(self.train_source)
        self.valid_batches = None if self.valid_source is None else self._batches(self.valid_source)

    def _batches(self, source: SampleSource) -> Batches:
        dp = self.groups.dp
        size, count = self.config.micro_batch_size, self.config.num_microbatches
        return Batches(source, size, count, dp.index, dp.size, self.device)

    @property
    def tokens_per_step(self) -> int:
        return self.config.global_batch_size * self.config.model.seq_length

    def train_step(self) -> StepResult:
        """One optimizer step on the next global batch; collective over the world."""
        step, first = self.steps_done, self.consumed_samples
        self.reducer.start_step()
        tokens = self._global_tokens(self.train_batches, first)
        loss_sum = self.executor.train_step(
            self.plan,
            lambda m: self.train_batches.micro_batch(first, m),
            1.0 / tokens.clamp(min=1.0),
            self.reducer.start_last_microbatch,
        )
        unused = self.reducer.finish_step()
        if unused and step == 0:
            log.warning("no gradient reached %s", ", ".join(unused))
        if self.config.sp:
            sum_partial_gradients(self.buckets, self.groups.tp)
        sum_tied_gradients(self._tied_gradient(), self.groups.embedding)
        loss, grad_norm = self._loss_and_norm(loss_sum, tokens)
        if not math.isfinite(loss + grad_norm):
            raise TrainingFailure(f"step {step + 1}: loss {loss}, gradient norm {grad_norm}")
        lr = learning_rate(self.config.optim, self.config.train.steps, step + 1)
        self.optimizer.step(lr, grad_norm)
        self.steps_done = step + 1
        self.consumed_samples += self.config.global_batch_size
        return StepResult(step + 1, loss, grad_norm, lr, self.tokens_per_step)

    def evaluate(self) -> float:
        """Mean loss over `train.eval_batches` global batches of held-out samples; collective."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        size = self.config.global_batch_size
        for first in range(0, self.config.train.eval_batches * size, size):
            tokens = self._global_tokens(self.valid_batches, first)
            loss_sum = self.executor.evaluate(
                lambda m, first=first: self.valid_batches.micro_batch(first, m),
                self.config.num_microbatches,
            )
            total += self._of_last_stage(loss_sum, tokens)
        collectives.all_reduce(total, self.groups.model)
        return float(total[0] / total[1])

    def _global_tokens(self, batches: Batches, first: int) -> Tensor:
        """Unmasked tokens of a global batch, float64; zero on stages without a loss."""
        count = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.groups.is_last_stage:
            count += batches.token_count(first)
            collectives.all_reduce(count, self.groups.dp)
        return count

    def _of_last_stage(self, loss_sum: Tensor, tokens: Tensor) -> Tensor:
        """(Σ losses of the global batch, tokens) on the last stage's first tp rank, else zeros.

        In a sum over the model group, one rank alone may speak for a replica.
        """
        if not self.groups.is_last_stage:
            return torch.zeros(2, dtype=torch.float64, device=self.device)
        collectives.all_reduce(loss_sum, self.groups.dp)
        return torch.stack((loss_sum, tokens)) * (self.groups.tp.index == 0)

    def _loss_and_norm(self, loss_sum: Tensor, tokens: Tensor) -> tuple[float, float]:
        """Global loss and gradient norm on every rank, by one small reduction over tp × pp."""
        mine = self._of_last_stage(loss_sum, tokens)
        sums = torch.cat((mine, self.optimizer.squared_norm().unsqueeze(0)))
        loss, count, squared = collectives.all_reduce(sums, self.groups.model).tolist()
        return loss / max(count, 1.0), squared**0.5

    def _tied_gradient(self) -> Tensor | None:
        """Gradient of the table that first and last stage of a pipeline both hold."""
        if not self.config.model.tie_embeddings or self.groups.pp.size == 1:
            return None
        if self.groups.is_first_stage:
            return self.stage.embedding.word.weight.main_grad
        return self.stage.head.table.main_grad if self.groups.is_last_stage else None

    def full_parameters(self) -> dict[str, Tensor]:
        """Logical name → full tensor on rank 0's CPU, an empty dict elsewhere; collective."""
        return gather_parameters(self.parameters.values(), self.groups)
