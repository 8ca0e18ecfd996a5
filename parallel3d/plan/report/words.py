"""What the best layout's numbers mean, for somebody who reads them for the first time."""

from __future__ import annotations

from parallel3d.config.recompute import parts_of
from parallel3d.config.schema import Config
from parallel3d.plan.search import Choice, Priced

PARTS = {
    "compute": "the busiest GPU computes, with waits inside of its layers",
    "bubble": "waiting for the pipeline to fill and to drain",
    "messages": "hidden states on their way to the next stage, as far as nothing hides them",
    "gradients": "summing gradients over the replicas beyond what the backward hides",
    "optimizer": "the optimizer's pass over its state",
    "fixed": "what a step takes whatever its size",
}
INSIDE = {
    "matrix products": "GEMMs of the layers, forward and both of the backward",
    "attention": "scores, softmax and values, forward and backward",
    "between the products": "norms, activations, residuals: bytes through the GPU's memory",
    "made again": "forwards that run again, as their results were not kept",
    "sums over tp": "waits for the other GPUs of a layer, as far as no product hides them",
    "head and embedding": "logits, loss and table, where the busiest stage has them",
    "launches": "the host, where it launches slower than the GPU computes, and gathers of zero=3",
}
KINDS = {
    "parameters": "parameters in the type that is computed with",
    "weight gradients": "gradients, fp32",
    "masters and moments": "fp32 copies and the optimizer's moments",
    "activations": "activations, kept from forward to backward",
    "logits": "logits of the head",
    "buffers": "buffers of collectives and tables",
    "reserve": "kept for the driver, NCCL and fragments",
}

UNMEASURED = (
    "MFU is an upper bound and the step's time a lower one: prices are datasheets' and others' "
    "published runs, and no GPU has been measured against them."
)


def caution(config: Config) -> str:
    """Returns what to say of a plan's times; nothing where the machine itself was measured."""
    return "" if config.cluster.file else UNMEASURED


def setting(choice: Choice, domain: int, count: int) -> list[tuple[str, str]]:
    """(what is typed, what it means here) of a layout with `count` micro-batches."""
    where = (
        "inside one NVLink domain, whose links carry a sum for every layer"
        if choice.tp <= domain
        else f"beyond the NVLink domain of {domain} GPUs"
    )
    said = [(f"tp={choice.tp}", f"each layer's matrices are cut over {choice.tp} GPUs {where}")]
    if choice.tp == 1:
        said = [("tp=1", "no layer is cut: nothing to sum inside of layers")]
    said.append(
        (f"pp={choice.pp}", f"the layers are cut into {choice.pp * choice.vpp} pieces on "
         f"{choice.pp} stages: each GPU holds 1/{choice.pp} of them")
        if choice.pp > 1
        else ("pp=1", "every GPU passes all layers: no pipeline and no bubble")
    )  # fmt: skip
    said.append(
        (f"dp={choice.dp}", f"{choice.dp} replicas read different samples and sum their gradients")
        if choice.dp > 1
        else ("dp=1", "one replica: no gradients to sum")
    )
    said.append(
        (f"micro_batch_size={choice.micro_batch}", f"{count} micro-batches a replica and step")
    )
    if choice.pp > 1:
        words = _SCHEDULES.get(choice.schedule, "")
        chunks = f" vpp={choice.vpp}" if choice.vpp > 1 else ""
        said.append((f"schedule={choice.schedule}{chunks}", words))
    if choice.zero:
        said.append((f"zero={choice.zero}", _ZERO[choice.zero]))
    if choice.recompute != "none":
        parts = parts_of(choice.recompute)
        again = " and ".join(words for part, words in _AGAIN.items() if part in parts)
        said.append((f"recompute={choice.recompute}", f"{again} made again, to save memory"))
    return said


_AGAIN = {
    "norm": "what norms give is",
    "activation": "the MLP's non-linearity is",
    "attention": "attention is",
    "mlp": "the MLP up to its last product is",
    "layer": "each layer's forward is",
}
_ZERO = {
    1: "the optimizer's state is cut over the replicas: same bytes sent, less memory",
    2: "gradients and the optimizer's state are cut over the replicas",
    3: "parameters too are cut over the replicas, and gathered before each layer",
}
_SCHEDULES = {
    "gpipe": "all forwards, then all backwards: simple, and every activation is held",
    "1f1b": "a forward and a backward in turn: no stage holds more micro-batches than there are "
    "stages",
    "interleaved": "several pieces a GPU, so that the pipeline fills faster",
    "zb_h1": "backwards in two halves: gradients of weights fill what would be idle",
    "interleaved_zb": "several pieces a GPU and backwards in two halves: the least idle time of "
    "loops, for somewhat more messages",
    "zbv": "two pieces a GPU, laid as a V, and backwards in two halves: hardly anything idles",
    "v_half": "two pieces a GPU, laid as a V, that hold half of 1F1B's activations",
}


def verdict(priced: Priced, first: int, room: float) -> str:
    """One sentence on memory."""
    held = float(priced.memory.total[first])
    words = "tight" if bool(priced.tight[first]) else "fits"
    return f"{words}: {held / 1e9:.1f} of {room / 1e9:.1f} GB on the fullest GPU"
