"""Lists the pieces of a model that `parallel3d calibrate` times, and fits them into memory.

A rank holds some pieces at once, as one pipeline in its process. The configuration of this pipeline
(`Pieces.configured`) is what the rank builds, and what `estimate.memory` bounds. If the pieces need
more memory than there is, fewer blocks, smaller micro-batches, and experts that are divided among
more ranks are timed. The module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from parallel3d.blueprint.ops import layer_kinds
from parallel3d.errors import UserError
from parallel3d.estimate.memory import peak_memory
from parallel3d.estimate.search import GIB
from parallel3d.host.quotas import available_memory
from parallel3d.models.declared import LayerKind
from parallel3d.models.keys import ModelConfig
from parallel3d.models.repeats import PARTS
from parallel3d.run_config import Config

# Share of a host's free memory for tensors: a process took 6 % more than a bound of 1.8 GiB.
USED_OF_HOST = 0.9
BLOCKS = 4  # number of blocks in a stage: enough that their weights do not fit into a cache
# Micro-batch sizes to measure. Sizes above 2 are skipped if they exceed the global batch size.
MICRO_BATCHES = (1, 2, 4, 16)
TOGETHER = 2  # number of micro-batches per run of the executor
# number of blocks in a stage for timing ep, since the device holds a model for each ep at once
FEW_BLOCKS = 2
MOST_SIZES = 3  # maximum number of micro-batch sizes that are measured with several ep


def powers_of_two(most: int) -> list[int]:
    """Returns the powers of two from 1 to `most`."""
    return [1 << i for i in range(most.bit_length())]


def shard_of(model: ModelConfig, tp: int) -> ModelConfig:
    """Returns the model with the sizes that one of `tp` tensor-parallel ranks holds."""
    return dataclasses.replace(
        model,
        num_attention_heads=model.num_attention_heads // tp,
        num_query_groups=max(1, model.kv_heads // tp),
        head_dim=model.head_size,
        ffn_hidden_size=model.ffn_size // tp,
        vocab_size=model.padded_vocab_size // tp,
        vocab_multiple=1,
    )


def tensor_sizes(model: ModelConfig, most: int) -> list[int]:
    """Returns the values of tp, up to `most`, that the sizes of the model allow."""
    sizes, kv = [model.num_attention_heads, model.padded_vocab_size], model.kv_heads
    if len(model.expert_layers) < model.num_layers:
        sizes.append(model.ffn_size)
    if model.num_experts:  # with experts, tp also divides the sequence
        sizes += [model.seq_length, model.shared_expert_size]
    return [
        tp
        for tp in range(1, most + 1)
        if not any(size % tp for size in sizes) and not (kv % tp and tp % kv)
    ]


def expert_sizes(model: ModelConfig, most: int, least: int = 1) -> list[int]:
    """Returns the values of ep to measure: powers of two up to `most` that divide num_experts.

    They begin with `least`, which may be more than `most`.
    """
    return [
        ep for ep in powers_of_two(max(most, least)) if ep >= least and model.num_experts % ep == 0
    ]


class Blocks(NamedTuple):
    """Describes a stage of blocks of one kind, and names the parts that they repeat."""

    kind: LayerKind
    repeats: Collection[str] = ()


@dataclass(frozen=True)
class Pieces:
    """Describes a pipeline on one rank: the embedding, stages of blocks, and the head.

    If tp > 1, a model with experts runs with sequence parallelism and simulated peers. Any other
    model is reduced to the sizes of one tensor-parallel rank and runs without peers.

    Attributes:
        size: number of samples in a micro-batch.
        given: the stages between the embedding and the head, or () for a stage for each kind of
            layer.
        tp: the tensor-parallel size.
        ep: the expert-parallel size.
        most_blocks: maximum number of blocks in a stage.
    """

    size: int
    given: tuple[Blocks, ...] = ()
    tp: int = 1
    ep: int = 1
    most_blocks: int = BLOCKS

    def stages(self, model: ModelConfig) -> list[tuple[Blocks, range]]:
        """Returns the stages of blocks, each with the numbers of its layers in `configured`."""
        kinds, found, begin = layer_kinds(model), [], 0
        for blocks in self.given or map(Blocks, kinds):
            count = min(self.most_blocks, kinds[blocks.kind])
            found.append((blocks, range(begin, begin + count)))
            begin += count
        return found

    def configured(self, config: Config, device: str) -> Config:
        """Returns the configuration of a pipeline on one rank with these stages.

        The embedding and the head belong to its first and its last stage, and no block recomputes.
        `device` is the type of the rank's device.
        """
        whole, stages = config.model, self.stages(config.model)
        sp = whole.num_experts > 0 and self.tp > 1
        kinds = [LayerKind.of(whole, layer) for layer in range(whole.num_layers)]
        like = [kinds.index(blocks.kind) for blocks, layers in stages for _ in layers]
        types = whole.layer_types
        model = dataclasses.replace(
            whole if sp else shard_of(whole, self.tp),
            num_layers=len(like),
            layer_types=types and [types[layer % len(types)] for layer in like],
            dense_layers=[at for at, layer in enumerate(like) if not whole.has_experts(layer)],
        )
        return dataclasses.replace(
            config,
            model=model,
            device=device,
            micro_batch_size=self.size,
            global_batch_size=TOGETHER * self.size * self.ep,
            tp=self.tp if sp else 1,
            cp=1,
            pp=1,
            vpp=len(stages),
            dp=self.ep,
            ep=self.ep,
            sp=sp,
            zero=0,
            recompute="none",
            recompute_layers=None,
            offload_layers=None,
            schedule=dataclasses.replace(
                config.schedule,
                name="interleaved_zb",
                layers_per_stage=[len(layers) for _, layers in stages],
            ),
            tensor_parallel=dataclasses.replace(config.tensor_parallel, chunks=1),
            moe=dataclasses.replace(config.moe, routing="balanced", overlap=False),
            optim=dataclasses.replace(config.optim, freeze=None),
        )

    def nbytes(self, config: Config, device: str) -> float:
        """Returns an upper bound of the memory that these pieces need for a step."""
        return float(peak_memory(self.configured(config, device), 0).total)


@dataclass(frozen=True)
class Extent:
    """Says which pieces are timed.

    Attributes:
        sizes: micro-batch sizes, rising; at least two.
        blocks: maximum number of blocks of each kind.
        ep: the smallest expert-parallel size.
        apart: whether the parts of a layer that are repeated are timed one after the other.
    """

    sizes: tuple[int, ...]
    blocks: int
    ep: int = 1
    apart: bool = False

    def of_size(self, size: int, tp: int) -> Pieces:
        """Returns a stage for each kind of layer, on micro-batches of `size` samples."""
        return Pieces(size, tp=tp, ep=self.ep, most_blocks=self.blocks)

    def of_recomputation(self, kind: LayerKind, tp: int) -> list[tuple[Sequence[str], Pieces]]:
        """Returns repeated parts, with a stage without recomputation and one for each part.

        A rank holds one element of the list at a time.
        """
        # Each stage holds all experts of its blocks, so the stages have one block each.
        few = 1 if kind.experts else self.blocks
        found: list[tuple[Sequence[str], Pieces]] = []
        for parts in [(part,) for part in PARTS] if self.apart else [PARTS]:
            stages = Blocks(kind), *(Blocks(kind, (part,)) for part in parts)
            found.append((parts, Pieces(self.sizes[1], stages, tp, self.ep, few)))
        return found

    def of_experts(self, model: ModelConfig, size: int, most: int) -> dict[int, Pieces]:
        """Returns the pieces for each ep, which a rank holds all at once.

        Kinds of layers with experts differ in their attention alone, which ep does not change, so
        one of the kinds is enough.
        """
        sparse = next(Blocks(kind) for kind in layer_kinds(model) if kind.experts)
        few = min(FEW_BLOCKS, self.blocks)
        sizes = expert_sizes(model, most, self.ep)
        return {ep: Pieces(size, (sparse,), ep=ep, most_blocks=few) for ep in sizes}

    def held(self, model: ModelConfig, most: int) -> Iterator[Sequence[Pieces]]:
        """Yields the pieces with the largest micro-batches that a rank holds at the same time.

        `most` is the largest number of ranks in a group.
        """
        for tp in tensor_sizes(model, most):
            yield [self.of_size(self.sizes[-1], tp)]
            for kind in layer_kinds(model):
                yield from ([pieces] for _, pieces in self.of_recomputation(kind, tp))
        if model.num_experts:
            size = self.sizes[:MOST_SIZES][-1]
            yield [*self.of_experts(model, size, most).values()]

    def nbytes(self, config: Config, device: str, most: int) -> Iterator[float]:
        """Yields upper bounds of the memory that rank 0 needs at one time after the other."""
        for pieces in self.held(config.model, most):
            yield sum(each.nbytes(config, device) for each in pieces)

    def fits(self, config: Config, device: str, most: int, room: float) -> bool:
        """Returns whether rank 0 never needs more than `room` bytes."""
        return all(nbytes <= room for nbytes in self.nbytes(config, device, most))


def whole_extent(config: Config) -> Extent:
    """Returns the extent that is timed if there is enough memory."""
    most = max(2, config.global_batch_size)
    return Extent(tuple(size for size in MICRO_BATCHES if size <= most), BLOCKS)


def extents(config: Config) -> Iterator[Extent]:
    """Yields the extents that may be timed, the best first.

    Fewer blocks at once come first, since blocks for which memory is short fit into no cache. Next
    come smaller micro-batches, and last a larger ep. Prices of anything that is not timed are
    extrapolated.
    """
    sizes = whole_extent(config).sizes
    every = expert_sizes(config.model, config.model.num_experts)
    counts = range(len(sizes), 1, -1)
    at_once = (BLOCKS, False), (FEW_BLOCKS, False), (1, False), (1, True)
    for ep, count, (blocks, apart) in product(every, counts, at_once):
        yield Extent(sizes[:count], blocks, ep, apart)


def fitting(config: Config, device: str, most: int, room: float) -> tuple[Extent, str]:
    """Returns the best extent that fits into `room` bytes, and a sentence on what it leaves out.

    The sentence is "" if nothing is left out. Raises UserError if nothing fits. `device` is the
    type of the rank's device, and `most` is the largest number of ranks in a group.
    """
    whole = whole_extent(config)
    found = next((e for e in extents(config) if e.fits(config, device, most, room)), None)
    if found is None:
        raise UserError(_fits_nowhere(config, device, most, room))
    if found == whole:
        return found, ""
    said = []
    if found.blocks < whole.blocks:
        said.append(f"at most {_blocks(found.blocks)} of each kind instead of {whole.blocks}")
    if found.sizes != whole.sizes:
        said.append(
            f"micro-batches of up to {found.sizes[-1]} samples instead of {whole.sizes[-1]}"
        )
    if found.ep > whole.ep:
        said.append(f"ep={found.ep} or more, from which prices of a smaller ep are extrapolated")
    needed = max(whole.nbytes(config, device, most))
    return found, (
        f"calibrate times only {'; '.join(said)}: everything would need {needed / GIB:.1f} GiB, "
        f"but only {room / GIB:.1f} GiB can be used"
    )


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _fits_nowhere(config: Config, device: str, most: int, room: float) -> str:
    """Returns the error message for a model of which not even the smallest extent fits."""
    *_, least = extents(config)
    needed = max(least.nbytes(config, device, most))
    model = config.model
    experts = f" with ep={least.ep}" if model.num_experts else ""
    head = (
        f"model.seq_length={model.seq_length} must be smaller for calibrate: a block of each kind"
        f"{experts}, the embedding and the head need {needed / GIB:.1f} GiB with their optimizer "
        f"states, but only {room / GIB:.1f} GiB can be used; "
    )
    length = model.seq_length
    while length > 2:
        length //= 2
        shorter = dataclasses.replace(model, seq_length=length)
        smaller = dataclasses.replace(config, model=shorter)
        if least.fits(smaller, device, most, room):
            return f"{head}the nearest that fits is {length}"
    return f"{head}no length fits, so give a smaller model.hidden_size"


def fitting_on_all(config: Config, device: str, ranks: int, room: float, extent: Extent) -> Pieces:
    """Returns pieces that `ranks` ranks can hold at once in the `room` bytes that they share.

    They tell how much busy ranks slow each other down. This is a ratio, for which a part of the
    blocks and of the experts in `extent` is enough. Raises UserError if the smallest pieces do not
    fit.
    """
    every = expert_sizes(config.model, config.model.num_experts, extent.ep)
    counts = [blocks for blocks in (BLOCKS, FEW_BLOCKS, 1) if blocks <= extent.blocks]
    needed = 0.0
    for ep, blocks in product(every, counts):
        pieces = Pieces(1, ep=ep, most_blocks=blocks)
        needed = pieces.nbytes(config, device)
        if ranks * needed <= room:
            return pieces
    near = powers_of_two(max(1, int(room / needed)))[-1]
    raise UserError(
        f"calibrate.ranks={ranks} must be at most {near}: all ranks time a block of each kind at "
        f"once, each of them needs {needed / GIB:.1f} GiB, and only {room / GIB:.1f} GiB of this "
        f"host can be used; the nearest is calibrate.ranks={near}"
    )


def room_of_host() -> float:
    """Returns the bytes of the host's free memory that ranks on its CPUs may use."""
    return USED_OF_HOST * available_memory()


def check_memory(
    config: Config, device: str, ranks: int, sharing: int, room: float
) -> tuple[Extent, Pieces, str]:
    """Returns the pieces that fit into memory, and a sentence on those that do not fit, or "".

    The pieces are those that rank 0 times, and those that all ranks hold at once. Raises UserError
    if not even the smallest pieces fit.

    Args:
        config: the configuration of the measuring ranks.
        device: type of the ranks' device.
        ranks: number of ranks, which is the size of the largest group.
        sharing: number of ranks that share the memory.
        room: bytes that the pieces may use.
    """
    extent, left_out = fitting(config, device, ranks, room)
    return extent, fitting_on_all(config, device, sharing, room, extent), left_out
