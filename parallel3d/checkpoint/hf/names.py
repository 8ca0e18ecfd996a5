"""Maps the tensor names of Hugging Face models to ours, without torch and without files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product

from parallel3d.checkpoint.hf.experts import Place, joined_place, modules_of
from parallel3d.checkpoint.hf.families import FAMILIES, GPT2, ExpertNames, Family
from parallel3d.errors import UserError
from parallel3d.models.declared import (
    ATTENTION,
    DENSE,
    LayerKind,
    full_shapes_of,
    full_tensors,
    layer,
)
from parallel3d.models.dialect import GATED_DELTANET
from parallel3d.models.keys import ModelConfig

HEAD, OWN_HEAD = "lm_head.weight", "head.weight"
ROUTER, OF_EXPERTS, SINKS = "mlp.router", ".experts.", "attention.sinks"
EMBEDDINGS = dict.fromkeys(FAMILIES, "model.embed_tokens.weight")
EMBEDDINGS[GPT2] = "transformer.wte.weight"
LAYER_PREFIX = "model.layers."
LAYER = f"{LAYER_PREFIX}{{}}"
# transformers' module → ours: before the layers, in the halves of a layer, and after the layers.
# Without a name here, a mixer cannot be exported.
_BEFORE = {"model.embed_tokens": "embedding.word"}
_OF_MIXER: dict[str | None, dict[str, str]] = {
    ATTENTION: {
        "self_attn.q_proj": "attention.q",
        "self_attn.k_proj": "attention.k",
        "self_attn.v_proj": "attention.v",
        "self_attn.o_proj": "attention.out",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "self_attn.sinks": SINKS,
    }
}
# The same with a gate: its rows follow those of the queries in each head.
_Q, _WITH_GATE = "self_attn.q_proj", "attention.q attention.gate"
_OF_MLP: dict[str | None, dict[str, str]] = {
    DENSE: {
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }
}
_AFTER = {"model.norm": "final_norm"}
_GPT2 = (
    {"transformer.wte": "embedding.word", "transformer.wpe": "embedding.position"},
    {
        "transformer.h.{}.ln_1": "input_norm",
        "transformer.h.{}.attn.c_attn": "attention.q attention.k attention.v",
        "transformer.h.{}.attn.c_proj": "attention.out",
        "transformer.h.{}.ln_2": "mlp_norm",
        "transformer.h.{}.mlp.c_fc": "mlp.up",
        "transformer.h.{}.mlp.c_proj": "mlp.down",
    },
    {"transformer.ln_f": "final_norm"},
)
# Old and new prefixes of the text model's tensors in a vision model's folder.
TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
TEXT_HEADS = (f"language_model.{HEAD}", HEAD)
BASE_PREFIX = re.compile(r"^(model|transformer)\.")
TURNED = ("attention.q", "attention.k")  # modules whose rows RoPE rotates
CONVOLUTIONS = "conv1d.weight"  # (channels, 1, taps) in the file


@dataclass(frozen=True)
class HFTensor:
    """Describes one tensor of a Hugging Face checkpoint.

    Attributes:
        name: transformers' name, such as `model.layers.0.self_attn.q_proj.weight`.
        parts: names of our tensors, whose concatenation along dimension 0 is this tensor.
        rows: number of rows of each part.
        shape: shape of the tensor in the file.
        transposed: whether the file holds the transpose of the concatenated parts.
        wide: whether an export always writes the tensor in fp32 or fp64. This is needed for a
            router's bias, whose differences bf16 would erase.
        pairs: (size of a head, rotated dimensions) if RoPE pairs dimensions (2i, 2i + 1) in the
            file, or None if it pairs (i, i + r/2), as in our model.
        groups: number of groups of rows, such as heads. A group has its rows of the first part,
            then those of the second, and so on; with 1, the parts are simply concatenated.
        squeezed: whether the file has a further dimension of one element behind the first.
        experts: number of experts that the file joins along a first dimension; 0: it joins none.
            Each has the transpose of its parts' rows in turns: gate 0, up 0, gate 1, up 1, …
    """

    name: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    wide: bool = False
    pairs: tuple[int, int] | None = None
    groups: int = 1
    squeezed: bool = False
    experts: int = 0

    def places_of(self, part: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields, in order, the ranges of the file's rows that hold rows of a part.

        Args:
            part: index of the part.
            first, end: the part's first row and the one behind the last.
        """
        heights = [rows // self.groups for rows in self.rows]
        height, before, whole = heights[part], sum(heights[:part]), sum(heights)
        while first < end:
            group, row = divmod(first, height)
            count = min(height - row, end - first)
            begin = group * whole + before + row
            yield begin, begin + count
            first += count


def hf_tensors(model: ModelConfig, kind: str) -> list[HFTensor]:
    """Returns every tensor of `model` in the format `kind`, in the order of the layers.

    Families differ in the names of norms, and in the projections that they join into one tensor.
    GPT-2 (`GPT2LMHeadModel`) also transposes projections, because its layers are `Conv1D`, whose
    weight is (inputs, outputs). RoPE pairs dimensions (i, i + r/2) as in our model, so that rows
    keep their order, except in GLM-4, which pairs (2i, 2i + 1). A tied head is left out, as in
    transformers.
    """
    shapes = full_shapes_of(model)
    wide = {name for tensor in full_tensors(model) if tensor.wide for name in tensor.names}
    wide = {name for name in wide if not name.endswith(SINKS)}  # published in bf16
    tensors: list[HFTensor] = []
    for theirs, parts, in_layer in _pairs(model, kind):
        if parts[0] not in shapes:
            continue
        rows = tuple(shapes[name][0] for name in parts)
        if FAMILIES[kind].joins_experts and OF_EXPERTS in parts[0]:
            count = model.num_experts
            shape = (count, *shapes[parts[0]][:0:-1], sum(rows) // count)
            tensors.append(HFTensor(theirs, parts, rows, shape, experts=count))
            continue
        shape = (sum(rows), *shapes[parts[0]][1:])
        groups = _groups(model, FAMILIES[kind], theirs)
        squeezed = theirs.endswith(CONVOLUTIONS)
        shape = (shape[0], 1, *shape[1:]) if squeezed else shape
        transposed = kind == GPT2 and in_layer and len(shape) == 2
        shape = shape[::-1] if transposed else shape
        pairs = None
        if FAMILIES[kind].pairs and in_layer:
            _, number, name = parts[0].split(".", 2)
            if name.rpartition(".")[0] in TURNED:
                size = model.attention_kind(int(number)).head_size
                pairs = size, int(size * model.rotary_percent)
        how = transposed, parts[0] in wide, pairs, groups, squeezed
        tensors.append(HFTensor(theirs, parts, rows, shape, *how))
    if OWN_HEAD in shapes:
        rows = shapes[OWN_HEAD][:1]
        tensors.append(HFTensor(HEAD, (OWN_HEAD,), rows, shapes[OWN_HEAD]))
    if unnamed := shapes.keys() - {part for tensor in tensors for part in tensor.parts}:
        raise UserError(
            f"{min(unnamed)} has no name in Hugging Face's {FAMILIES[kind].title} format: this "
            "format does not know a layer of the model"
        )
    return tensors


def _groups(model: ModelConfig, family: Family, name: str) -> int:
    """Returns the number of groups of rows of a tensor (see `HFTensor`)."""
    module = name.rpartition(".")[0].partition(LAYER_PREFIX)[2].partition(".")[2]
    if family.gated and module == _Q:
        return model.num_attention_heads
    by_head = frozenset[str]() if family.delta is None else family.delta.by_head
    return model.key_heads if module in by_head else 1


def spellings(name: str, kind: str, *, wrapped: bool = False) -> list[str]:
    """Returns the names that a tensor of the format `kind` may have in a folder.

    A folder of a bare `LlamaModel` or `GPT2Model`, such as OpenAI's GPT-2, has names without the
    prefix `model.` or `transformer.`. With `wrapped`, the model is the text part of a vision model,
    whose names have one of two prefixes; Qwen3.5 only has the newer one.
    """
    if not wrapped:
        return [name, BASE_PREFIX.sub("", name)]
    found = [prefix + name.removeprefix("model.") for prefix in TEXT_PREFIXES]
    found = list(TEXT_HEADS) if name == HEAD else found
    return found[1:] if FAMILIES[kind].multimodal else found


def places(name: str, kind: str, *, wrapped: bool = False) -> list[Place]:
    """Returns the places that a tensor of the format `kind` may have in a folder."""
    found = [Place(key) for key in spellings(name, kind, wrapped=wrapped)]
    experts, delta = FAMILIES[kind].experts, FAMILIES[kind].delta
    for other, usual in ({} if delta is None else delta.other_names).items():
        if f".{usual}." in name:
            key = name.replace(f".{usual}.", f".{other}.")
            found += [Place(key) for key in spellings(key, kind, wrapped=wrapped)]
    joined = None if experts is None or experts.joined else joined_place(name, experts)
    if joined is not None:
        found += [joined._replace(key=key) for key in spellings(joined.key, kind, wrapped=wrapped)]
    return found


def is_of_text(key: str) -> bool:
    """Returns whether a tensor in a vision model's folder belongs to the text model."""
    return key.startswith(TEXT_PREFIXES) or key in TEXT_HEADS


def _modules(family: Family, model: ModelConfig, of: LayerKind) -> dict[str, str]:
    """Maps transformers' modules of a kind of layer to ours, in the order of the layer.

    Within a half of the layer, norms follow the matrices, as in transformers. Modules that the
    model lacks come last.
    """
    of_mixer, norms = _OF_MIXER.get(of.mixer, {}), family.norms
    if of.mixer == ATTENTION and family.gated:
        of_mixer = of_mixer | {_Q: _WITH_GATE}
    if of.mixer == GATED_DELTANET and family.delta is not None:
        of_mixer, norms = dict(family.delta.modules), family.delta.norms
    of_layer = of_mixer | _OF_MLP.get(of.mlp, {})
    joined = {part for parts in family.joined.values() for part in parts.split()}
    apart = {theirs: ours for theirs, ours in of_layer.items() if ours not in joined}
    found = {**norms, **family.joined, **apart}
    held = [tensor for tensors in layer(model, of).values() for tensor in tensors]
    halves = groupby(held, key=lambda tensor: tensor.name.split(".")[0])
    in_order = [
        tensor.name.removesuffix(".weight").removesuffix(".bias")
        for _, half in halves
        for tensor in sorted(half, key=lambda tensor: -len(tensor.dims))
    ]
    place = {ours: number for number, ours in reversed([*enumerate(in_order)])}
    ordered = sorted(found.items(), key=lambda pair: place.get(pair[1].split()[0], len(held)))
    modules = {f"{LAYER}.{theirs}": ours for theirs, ours in ordered}
    if of.experts and family.experts is not None:
        modules |= modules_of(family.experts, model.num_experts)
    return modules


def _pairs(model: ModelConfig, kind: str) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yields (transformers' tensor, our tensors, whether they are in a layer).

    This includes tensors that the model may lack, such as biases, and those of modules that are
    themselves a tensor.
    """
    family = FAMILIES[kind]
    names = family.experts
    before, in_gpt2, after = _GPT2 if kind == GPT2 else (_BEFORE, None, _AFTER)
    for theirs, ours in before.items():
        yield from _tensors_of(theirs, [ours], False)
    in_layer: dict[LayerKind, dict[str, str]] = {}
    for number in range(model.num_layers):
        of = LayerKind.of(model, number)
        if of not in in_layer:
            in_layer[of] = in_gpt2 or _modules(family, model, of)
        for theirs, ours in in_layer[of].items():
            mine = [f"layers.{number}.{part}" for part in ours.split()]
            if ours != ROUTER:
                yield from _tensors_of(theirs.format(number), mine, True)
                continue
            assert names is not None
            yield f"{theirs.format(number)}.weight", (f"{mine[0]}.weight",), True
            if names.joined:
                yield f"{theirs.format(number)}.bias", (f"{mine[0]}.logit_bias",), True
                yield from _joined_tensors(names, number, model.num_experts)
            if names.choice_bias is not None:
                block = f"model.layers.{number}.{names.block}"
                yield f"{block}.{names.choice_bias}", (f"{mine[0]}.bias",), True
    for theirs, ours in after.items():
        yield from _tensors_of(theirs, [ours], False)


def _joined_tensors(
    names: ExpertNames, number: int, experts: int
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yields the tensors that join the experts of layer `number`."""
    theirs, ours = f"model.layers.{number}.{names.block}", f"layers.{number}.mlp"
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        for end, part in (("", "weight"), ("_bias", "bias")):
            every = product(range(experts), parts)
            joined = (f"{ours}{OF_EXPERTS}{expert}.{of}.{part}" for expert, of in every)
            yield f"{theirs}{OF_EXPERTS}{name}{end}", tuple(joined), True


def _tensors_of(
    theirs: str, ours: list[str], in_layer: bool
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    for part in (".weight", ".bias", ""):
        yield theirs + part, tuple(module + part for module in ours), in_layer
