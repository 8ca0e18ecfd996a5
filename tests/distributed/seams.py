"""Lists the places (seams) at which known bugs are planted, by their names in the package.

Each is a public function or method through which a quantity passes that bugs of distributed
trainers change: the factor of gradients, a micro-batch, a message, a bucket's reduction. If the
package moves or renames one, only its line here has to follow. Production code knows nothing of
them, and pays nothing for them.

A bug is a function of the original that it replaces, called with the same arguments:

    @planted(GRADIENT_SCALE)
    def loss_not_divided_by_microbatches(sound: Any, trainer: Trainer, tokens: Tensor) -> Tensor:
        return sound(trainer, tokens) * trainer.schedule.microbatches

A seam that no run passes changes nothing, so the test of its bug fails, since no quantity differs.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

Mutation = Callable[[], AbstractContextManager[None]]
Bug = Callable[..., Any]


class Seam:
    """Names a function or method of the package, or several that do the same in different engines.

    Args:
        places: "module:function" or "module:Class.method", the modules counted from the package.
    """

    def __init__(self, *places: str) -> None:
        self.places = places

    @contextmanager
    def replaced(self, bug: Bug) -> Iterator[None]:
        """Puts `bug(sound, …)` in place of the function, wherever the package has imported it."""
        with ExitStack() as stack:
            for place in self.places:
                stack.enter_context(_replaced(place, bug))
            yield


def found(place: str) -> tuple[Any, str, Callable[..., Any]]:
    """Returns the module or class that defines the function at a place, its name, and the
    function."""
    module, path = place.split(":")
    owner: Any = importlib.import_module(f"parallel3d.{module}")
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return owner, name, vars(owner)[name]


@contextmanager
def _replaced(place: str, bug: Bug) -> Iterator[None]:
    owner, name, sound = found(place)

    @functools.wraps(sound)
    def changed(*args: Any, **named: Any) -> Any:
        return bug(sound, *args, **named)

    if isinstance(owner, type):
        setattr(owner, name, changed)
        try:
            yield
        finally:
            setattr(owner, name, sound)
        return
    _exchange(sound, changed)
    try:
        yield
    finally:
        _exchange(changed, sound)  # also in modules that were imported in the meantime


def _exchange(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replaces `old` by `new` in all modules of the package."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "parallel3d":
            for known in [known for known, value in vars(module).items() if value is old]:
                setattr(module, known, new)


def planted(seam: Seam) -> Callable[[Bug], Mutation]:
    """Makes a context of a bug, inside which it is in place."""

    def decorate(bug: Bug) -> Mutation:
        @functools.wraps(bug)
        def mutation() -> AbstractContextManager[None]:
            return seam.replaced(bug)

        return mutation

    return decorate


# A step
STEP = Seam("trainer:RankTrainer.train_step")
EVALUATION = Seam("trainer:RankTrainer.score")
GLOBAL_TOKENS = Seam("trainer:RankTrainer.global_tokens")
GRADIENT_SCALE = Seam("trainer:RankTrainer.gradient_scale")
SLICES = Seam("trainer:RankTrainer.parameter_slices")
SHARE_OF_LOSS = Seam("trainer:RankTrainer.share_of_loss")
SHARE_OF_NORM = Seam("trainer:RankTrainer.share_of_norm")
UPDATE = Seam("optim.optimizer:Optimizer.step")

# Parameters
INITIAL_VALUES = Seam("parameters.initializer:Initializer.fill")
PARAMETER = Seam("parameters.initializer:Initializer.parameter")
ROUNDED_PIECES = Seam("parameters.rounding:pieces_of")
COPY_GROUPS = Seam("parameters.copies:copy_groups")
SEGMENT_BY_KIND = Seam("parameters.segments:Segment.by_kind")
TREATMENT = Seam("optim.keys:OptimConfig.treatment")

# Frozen parameters
FREEZE = Seam("build:freeze")
FIRST_TRAINED = Seam("blueprint.parameters:first_trained")

# Samples
MICRO_BATCH = Seam("data.loader:Batches.micro_batch")
LAST_SAMPLES = Seam("data.sampler:FirstSamples.sample")
ATTENDED_KEYS = Seam("context_parallel.documents:segments_of")
WINDOWS = Seam("context_parallel.windows:window_blocks")

# A pipeline
PROGRAM = Seam("trainer:RankTrainer.use")
MESSAGES = Seam("pipeline.p2p:post")

# Layers
STAGE = Seam("models.transformer:Stage.forward")
LINEAR_FORWARD = Seam("tensor_parallel.linear_ops:run_forward")
LINEAR_BACKWARD = Seam("tensor_parallel.linear_ops:run_backward")
ROW_PARALLEL = Seam("tensor_parallel.layers:RowParallelLinear.forward")
WEIGHT_GRADIENT = Seam("parameters.gradients:add_weight_gradient")
ATTENTION = Seam("models.attention:attend_split")
PLAIN_SCORES = Seam("context_parallel.document_attention:plain_scores")
ACROSS_RANKS = Seam("context_parallel.attention:attend_across")
WINDOW_ATTENTION = Seam("context_parallel.window_attention:attend_in_window")
DROPPED_ATTENTION = Seam("models.dropout:attend_dropping")
JOINED_SINKS = Seam("context_parallel.sinks:join_sinks")
SINK_GRADIENTS = Seam("context_parallel.sinks:gradient_of_sinks")
FIRST_HEAD = Seam("context_parallel.attention:ContextParallel.first_head")
CACHED_STEP = Seam("models.key_value_cache:KeyValueCache.step")
TOKENS_BEFORE = Seam("context_parallel.states:tokens_before")
STATES_BEFORE = Seam("context_parallel.states:states_before")
STATE_GRADIENTS = Seam("context_parallel.states:gradients_after")
ORDERED_PIECES = Seam("context_parallel.states:in_sequence_order")
CONVOLVED_HEADS = Seam("models.gated_deltanet:GatedDeltaNet.heads")
BY_CHAIN = Seam("models.gated_deltanet:GatedDeltaNet.mixed_by_chain")
MERGED_BLOCKS = Seam("context_parallel.document_attention:merge")
KIND_OF_LAYER = Seam("models.keys:ModelConfig.attention_kind")
ROWS_RECEIVED = Seam("comm.collectives:all_to_all_rows")
HALO_GRADIENTS = Seam("context_parallel.window_attention:HaloExchange.gradients")
RING_GRADIENTS = Seam("context_parallel.attention:add_arriving")
FULL_NORM = Seam("models.full_norm:sum_over_ranks")
SQUARES = Seam("models.full_norm:sums_of_squares")
DROPOUT = Seam("models.dropout:Dropout.forward")
LOSS = Seam("tensor_parallel.loss:ChunkLoss.statistics")
LOGITS = Seam("device.capping:scaled_and_capped")
SLOPE_OF_LOGITS = Seam("device.capping:slope_of")
WORDS = Seam("models.embedding_and_head:Embedding.of_words")
NORM = Seam("models.layers:Norm.forward")
ROTARY = Seam("models.rotary:rotary_tables")
POSITIONS = Seam("models.transformer:Stage.with_positions")
GATE = Seam("models.transformer:sigmoid_gated")
PROJECTED = Seam("models.transformer:Attention.project")
ADDED_BY_ATTENTION = Seam("models.transformer:TransformerBlock.added_by_attention")
DIFFERENTIATED = Seam("context_parallel.document_attention:differentiate_block")
RECOMPUTED = Seam("models.checkpointing:recomputed")
COMPILED = Seam("models.transformer:compile_blocks")

# Gated DeltaNet
CONVOLUTION = Seam("models.gated_deltanet:causal_convolution")
DELTA_RULE = Seam("models.gated_deltanet:delta_output")
CHUNKS = Seam("models.delta_rule:RuleChunks.__init__")
RATES = Seam("models.gated_deltanet:Rates.forward")
LENGTH = Seam("models.gated_deltanet:with_length")
GATED_NORM = Seam("models.gated_deltanet:GatedNorm.forward")
DECODED = Seam("models.gated_deltanet:DeltaState.step")

# Experts
ROUTER = Seam("experts.router:Router.forward")
SCORES = Seam("experts.router:scores_of")
RANKED = Seam("experts.router:ranked")
CHOSEN = Seam("experts.router:choose")
CHOICE_WEIGHTS = Seam("experts.router:weights_of")
EXPERTS = Seam("experts.grouped:run_experts")
EXPERT_BIASES = Seam("experts.grouped:add_biases")
EXPERT_GRADIENT = Seam("experts.gradients:add_grouped_gradient")
SUMMED_SLOTS = Seam("experts.rows:sum_of_slots")
LAYER_OF_EXPERTS = Seam("models.experts:MixtureOfExperts.inner")
ACTIVATION = Seam("models.mlp:activate")
ATTACHED_LOSSES = Seam("experts.balance:BalanceLosses.through")
PART_OF_TOKENS = Seam("experts.balance:Balance.at")
TALLY = Seam("experts.balance:Tally.add")
BALANCE_SCALES = Seam("experts.balance:BalanceOfRun.scaled")
LAYER_SUMS = Seam("experts.balance:BalanceOfRun.take")
BIAS_UPDATE = Seam("experts.balance:BalanceOfRun.update")
UPDATED_BIAS = Seam("experts.balance:updated_bias")
ROUTED_TOKENS = Seam("data.loader:Batches.routed_count")
MATRICES_OF_TP = Seam("optim.muon:Muon.gather_over_tp")
ORTHOGONAL = Seam("optim.muon:newton_schulz")

# Gradients, summed over the ranks
ENGINE = Seam("data_parallel.build:data_parallel_engine")
START_STEP = Seam(
    "data_parallel.engine:BucketedDataParallel.start_step",
    "data_parallel.fully_sharded:FullyShardedDataParallel.start_step",
)
LAST_MICROBATCH = Seam("data_parallel.fully_sharded:FullyShardedDataParallel.start_last_microbatch")
FINISH_STEP = Seam(
    "data_parallel.engine:BucketedDataParallel.finish_step",
    "data_parallel.fully_sharded:FullyShardedDataParallel.finish_step",
)
BUCKET = Seam("data_parallel.engine:BucketedDataParallel.reduce_bucket")
REDUCE_SCATTER = Seam("comm.collectives:reduce_scatter_bucket")
REPLICAS = Seam("data_parallel.fully_sharded:all_reduce_replicas")
GATHERED_PARAMETERS = Seam("data_parallel.engine:BucketedDataParallel.all_gather_params")
NORM_GRADIENTS = Seam("tensor_parallel.partial_gradients:all_reduce_layernorm_grads")
SHARED_HEADS = Seam("tensor_parallel.partial_gradients:all_reduce_shared_kv_grads")
TIED_TABLE = Seam("tensor_parallel.partial_gradients:all_reduce_embedding_grads")

# An accelerator and its communicators
MADE_GROUP = Seam("comm.process_groups:GroupMaker.make")
CLOSED_GROUPS = Seam("comm.process_groups:ProcessGroups.close")
SIDE_STREAM = Seam("data_parallel.comm_hooks:SideStream.run")
TO_DEVICE = Seam("device.accelerator:moved")
ADDED_ROWS = Seam("tensor_parallel.embedding:add_rows")
WIDE_PRODUCTS = Seam("parameters.gradients:supports_wide_addmm")
FUSED = Seam("device.fused:fuses")
