"""What the layers of a rank send over tp in one step (see `traffic`)."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.sizes.recompute import collectives_again
from parallel3d.sizes.transfer import PipelineRank, Transfer


def layer_transfers(rank: PipelineRank) -> Iterator[Transfer]:
    """tensor_parallel/linear_nodes.py: a layer has two column- and two row-parallel GEMMs."""
    whole, what = rank.hidden, "activations of the layers"
    microbatches = rank.config.num_microbatches
    layers = rank.layer_count * microbatches
    recomputed = rank.recomputed_layers * microbatches
    again = collectives_again(rank.recompute)
    if rank.config.tensor_parallel.attention == "gather_qk":
        model, tp = rank.config.model, rank.layout.tp
        heads = model.num_attention_heads + max(model.kv_heads, tp)  # of q and k, copies too
        every = rank.tokens * heads * model.head_size * rank.item
        twice = recomputed * ("layer" in rank.recompute)
        yield Transfer("tp", "all_gather", every, layers + twice, "q and k of all heads")
        yield Transfer("tp", "reduce_scatter", every, layers, "gradients of q and k")
    if not rank.sp:
        yield Transfer("tp", "all_reduce", whole, 4 * layers + again.sums * recomputed, what)
        return
    # The backward of a column-parallel GEMM gathers the shard that was kept and scatters its
    # gradient, both in one.
    yield Transfer("tp", "all_gather", whole, 2 * layers, what)
    yield Transfer("tp", "reduce_scatter", whole, 2 * layers, what)
    # In pieces: the forward gathers for column- and scatters for row-parallel ones, and the
    # backward of the row-parallel ones gathers.
    chunks = rank.config.tensor_parallel.chunks
    piece = whole // chunks
    gathers = 4 * layers + again.gathers * recomputed
    scatters = 2 * layers + again.scatters * recomputed
    yield Transfer("tp", "all_gather", piece, chunks * gathers, what)
    yield Transfer("tp", "reduce_scatter", piece, chunks * scatters, what)
