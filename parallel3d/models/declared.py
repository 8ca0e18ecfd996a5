"""Declares the parameters of a model: what each module holds, by kind of layer. No torch.

The modules are built from these declarations, and shapes, stages, gradient buckets and checkpoints
are derived from them. A function declares one module: name of a local parameter within the module →
the full tensors that it holds, in the order of `Module.named_parameters()`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parallel3d.models.dialect import GATED_DELTANET, Rope
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import survey_of
from parallel3d.parameters.declaration import (
    Dimension,
    Drawn,
    FullTensor,
    Held,
    column_parallel,
    named,
    placed,
    row_parallel,
    vector,
    vocabulary_table,
    within,
)

WORD_EMBEDDING = "embedding.word.weight"
ATTENTION, DENSE, EXPERTS = "attention", "dense", "experts"
DELTA_CHUNK = 64  # tokens of a chunk of the gated delta rule


class LayerKind(NamedTuple):
    """The properties in which the layers of a model differ.

    Attributes:
        mlp: DENSE or EXPERTS; None: the layer has no second half.
        window: number of keys that a query sees, its own included, or None for all up to its own.
        rope: rotary positions, or None if RoPE does not rotate q and k.
        mixer: what mixes tokens, a name in `MIXERS`; None: the layer has no first half.
        heads: number of query heads, or of the heads of another mixer's output.
        kv_heads: number of key-value heads, or of the heads that another mixer's heads share.
        head_size: width of a head of the output.
        norm_position: where the layer has norms (`NORM_POSITIONS`).
        own: which of the user's own blocks the layer is (`ModelSurvey.blocks`); None: it is a layer
            of the transformer.
    """

    mlp: str | None = DENSE
    window: int | None = None
    rope: Rope | None = None
    mixer: str | None = ATTENTION
    heads: int = 1
    kv_heads: int = 1
    head_size: int = 1
    norm_position: str = "before"
    own: int | None = None

    @classmethod
    def of(cls, model: ModelConfig, layer: int) -> LayerKind:
        """Returns the kind of a layer of the model."""
        if (survey := survey_of(model)) is not None:
            return cls(None, mixer=None, own=survey.block_of_layer[layer])
        attention, word = model.attention_kind(layer), model.layer_type(layer)
        mixer = word if word in MIXERS else ATTENTION
        heads = attention.heads, attention.kv_heads, attention.head_size
        if (of_mixer := MIXERS[mixer].heads) is not None:
            heads = of_mixer(model)
        return cls(
            EXPERTS if model.has_experts(layer) else DENSE,
            attention.window,
            attention.rope,
            mixer,
            *heads,
            (mixer == GATED_DELTANET and model.delta_norm_position) or model.norm_position,
        )

    @property
    def experts(self) -> bool:
        """Whether the layer has experts in place of an MLP."""
        return self.mlp == EXPERTS

    @property
    def rotates(self) -> bool:
        """Whether RoPE rotates q and k."""
        return self.rope is not None

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the layer's norms over the hidden dimension, in the order in which they run."""
        before, after = self.norm_position != "after", self.norm_position != "before"
        halves = (
            (self.mixer, "input_norm", "attention_output_norm"),
            (self.mlp, "mlp_norm", "mlp_output_norm"),
        )
        return tuple(
            name
            for half, of_input, of_output in halves
            if half is not None
            for name in [of_input] * before + [of_output] * after
        )


@dataclass(frozen=True)
class KnownModel:
    """A model that is known by its text; a search asks for the same facts for each layout."""

    of_class: type[ModelConfig]
    text: str
    model: ModelConfig = field(compare=False)

    @classmethod
    def of(cls, model: ModelConfig) -> KnownModel:
        survey = survey_of(model)
        return cls(type(model), repr(model) + ("" if survey is None else survey.digest), model)


def kinds_of_layers(model: ModelConfig) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer of the model."""
    return kinds_of_known(KnownModel.of(model))


@functools.lru_cache(maxsize=64)
def kinds_of_known(of: KnownModel) -> tuple[LayerKind, ...]:
    """Does the same as `kinds_of_layers`."""
    return tuple(LayerKind.of(of.model, layer) for layer in range(of.model.num_layers))


def layer_kinds(model: ModelConfig) -> dict[LayerKind, int]:
    """Returns the number of layers of each kind in the model, with dense kinds first."""
    counts = Counter(kinds_of_layers(model))
    return {kind: counts[kind] for kind in sorted(counts, key=lambda kind: kind.experts)}


def hands_states(model: ModelConfig) -> bool:
    """Returns whether a layer of the model hands states from piece to piece of a sequence."""
    mixers = {kind.mixer for kind in kinds_of_layers(model)} - {None}
    return any(MIXERS[mixer].hands_states for mixer in mixers if mixer is not None)


def hidden_of(model: ModelConfig) -> Dimension:
    return Dimension("hidden", model.hidden_size)


def output_std(model: ModelConfig) -> float:
    """Returns the initial standard deviation of layers that write into the residual stream.

    It shrinks with the number of such layers (Radford et al. 2019).
    """
    return model.init_std / math.sqrt(2 * model.num_layers)


def offset_of(model: ModelConfig) -> float:
    """Returns the number that RMSNorms add to their weights: 1 if zero-centred, else 0.

    The initial value of the weights is 1 minus this number.
    """
    return 1.0 if model.norm_zero_centered else 0.0


def norm(model: ModelConfig) -> Held:
    """Declares a norm over the hidden dimension."""
    hidden = hidden_of(model)
    held: Held = {"weight": (vector("weight", hidden, fill=1.0 - offset_of(model)),)}
    return held | ({"bias": (vector("bias", hidden),)} if model.norm == "layernorm" else {})


def heads_of(kind: LayerKind) -> tuple[Dimension, Dimension]:
    """Returns the dimensions of the queries and of the keys (or values) of all heads."""
    return (
        Dimension("queries", kind.heads * kind.head_size, kind.heads),
        Dimension("keys", kind.kv_heads * kind.head_size, kind.kv_heads),
    )


def head_norm(model: ModelConfig, kind: LayerKind) -> Held:
    """Declares the norms of q and k, of each head by itself or of all heads as one vector."""
    fill, head, held = 1.0 - offset_of(model), Dimension("head", kind.head_size), Held()
    for part, width in zip("qk", heads_of(kind), strict=True):
        name = f"{part}_norm.weight"
        if model.qk_norm_width == "full":
            of_all = vector(name, width, split=0, fill=fill)._replace(norm_over_tp=True)
            held[part] = (of_all,)
        else:
            held[part] = (vector(name, head, fill=fill)._replace(of_heads=True),)
    return held


def sinks_of_heads(model: ModelConfig, kind: LayerKind) -> Held:
    """Declares a sink for each query head, drawn as gpt-oss draws them."""
    sinks = vector("sinks", Dimension("query heads", kind.heads, kind.heads), split=0)
    return {"sinks": (sinks._replace(std=model.init_std, wide=True),)}


def attention(model: ModelConfig, kind: LayerKind) -> Held:
    """Declares attention: sinks, a gate, q, k and v in one linear layer, norms, the output."""
    hidden, (queries, keys) = hidden_of(model), heads_of(kind)
    matrices = {"gate": queries} if model.attention_gate else {}
    matrices |= {"q": queries, "k": keys, "v": keys}  # what ranks may share comes last
    qkv = column_parallel(matrices, hidden, model.init_std, model.qkv_bias)
    sinks = sinks_of_heads(model, kind) if model.attention_sinks else {}
    out = row_parallel("out", queries, hidden, output_std(model), model.out_bias)
    norms = placed("head_norm", head_norm(model, kind)) if model.qk_norm else {}
    return sinks | placed("qkv", qkv) | norms | placed("out", out)


def gated_deltanet(model: ModelConfig, kind: LayerKind) -> Held:
    """Declares gated DeltaNet: one linear layer of its input, a convolution, decay, norm, output.

    The matrices of the linear layer are those of the output's gate z, of the learning rate β (b)
    and the decay (a) of each value head, and of v, q and k, which pass the convolution. The rates
    are drawn as in Mamba-2 (Dao and Gu 2024).
    """
    hidden, (key_size, value_size) = hidden_of(model), model.delta_sizes
    values = Dimension("values", kind.heads * value_size, kind.heads)
    of_head = Dimension("value_heads", kind.heads, kind.heads)
    keys = Dimension("keys", kind.kv_heads * key_size, kind.kv_heads)
    taps = Dimension("taps", model.delta_convolution)
    convolved = {"v": values, "q": keys, "k": keys}  # what ranks may share comes last
    matrices = {"z": values, "b": of_head, "a": of_head} | convolved
    inner = column_parallel(matrices, hidden, model.init_std, bias=False)
    std = (3 * taps.size) ** -0.5  # that of the uniform numbers which torch draws
    convolution = tuple(
        FullTensor(f"{name}_conv.weight", (channels, taps), 0, std, decays=False)
        for name, channels in convolved.items()
    )
    decay = vector("A_log", of_head, split=0)._replace(wide=True, drawn=Drawn(0.0, 16.0, "log"))
    time = decay._replace(name="dt_bias", drawn=Drawn(0.001, 0.1, "inverse_softplus"))
    norm = vector("o_norm.weight", Dimension("head", value_size), fill=1.0)
    own: Held = {
        "conv.weight": convolution,
        "rates.A_log": (decay,),
        "rates.dt_bias": (time,),
        "norm.weight": (norm._replace(of_heads=True, wide=True),),
    }
    out = row_parallel("out", values, hidden, output_std(model), bias=False)
    return placed("inner", inner) | own | placed("out", out)


def mlp(model: ModelConfig, width: int, bias: bool) -> Held:
    """Declares an MLP; gate and up are in one linear layer."""
    hidden, ffn = hidden_of(model), Dimension("ffn", width)
    matrices = dict.fromkeys(("gate", "up") if model.is_gated else ("up",), ffn)
    up = column_parallel(matrices, hidden, model.init_std, bias)
    down = row_parallel("down", ffn, hidden, output_std(model), bias)
    return placed("up", up) | placed("down", down)


def dense_mlp(model: ModelConfig, _: LayerKind) -> Held:
    return mlp(model, model.ffn_size, model.bias)


def router(model: ModelConfig) -> Held:
    """Declares a router: the bias of its logits is trained, and that of its choice is a state."""
    count = Dimension("experts", model.num_experts)
    weight = FullTensor("weight", (count, hidden_of(model)), std=model.init_std)
    held: Held = {"weight": (weight,)}
    if model.router_logit_bias:
        held["logit_bias"] = (vector("logit_bias", count),)
    if model.router_bias:
        held["bias"] = (vector("bias", count)._replace(is_state=True, wide=True),)
    return held


def experts(model: ModelConfig, _: LayerKind) -> Held:
    """Declares a mixture of experts: gate of the shared expert, router, experts, shared expert.

    Every tp rank holds the router and its experts whole, because each token is on one rank.
    """
    hidden, ffn = hidden_of(model), Dimension("ffn", model.expert_size)
    shared, gates = Held(), Held()
    if model.shared_expert_size:
        shared = within("shared", mlp(model, model.shared_expert_size, bias=False))
        if model.shared_expert_gate:
            dims = Dimension("gate", 1), hidden
            gate = FullTensor("shared_gate.weight", dims, std=model.init_std, muon=True)
            gates["shared_gate"] = (gate,)

    count = model.num_experts

    def weights(parts: Sequence[str], out: Dimension, inputs: Dimension, std: float) -> Held:
        names = [f"experts.{{}}.{part}" for part in parts]
        every = [
            FullTensor(f"{name}.weight", (out, inputs), std=std, muon=True, experts=count)
            for name in names
        ]
        held: Held = {"weight": tuple(every)}
        if model.expert_bias:
            biases = (vector(f"{name}.bias", out)._replace(experts=count) for name in names)
            held["bias"] = tuple(biases)
        return held

    up = weights(("gate", "up") if model.is_gated else ("up",), ffn, hidden, model.init_std)
    down = weights(("down",), hidden, ffn, output_std(model))
    held = Held()
    for name, of in (("experts.up", up), ("experts.down", down)):
        held |= {name: of["weight"], **({f"{name}_bias": of["bias"]} if "bias" in of else {})}
    return gates | within("router", router(model)) | held | shared


def flops_of_attention(_: ModelConfig, kind: LayerKind) -> tuple[float, float]:
    """Returns the FLOPs of attention as `Mixer.flops`: two products with each key and value."""
    return 0.0, 4.0 * kind.heads * kind.head_size


def flops_of_delta(model: ModelConfig, kind: LayerKind) -> tuple[float, float]:
    """Returns the FLOPs of the gated delta rule as `Mixer.flops`, in chunks of DELTA_CHUNK tokens.

    Three products are with states, and the others, as in attention over whole squares, with the
    tokens of a chunk: KKᵀ, QKᵀ, the solution of a system for V and K, and the scores times V.
    """
    keys, values = model.delta_sizes
    with_tokens = 2 * (keys + keys) + 2 * (keys + values) + 2 * values
    return float(kind.heads * (6 * keys * values + DELTA_CHUNK * with_tokens)), 0.0


Declare = Callable[[ModelConfig, LayerKind], Held]


class Mixer(NamedTuple):
    """What mixes the tokens of a layer.

    Attributes:
        declare: declares its parameters.
        module: its class, as "module:class" of the package, imported where a layer is built. It is
            made of the layer's number and kind, its declared parameters, the model and the context;
            `transformer.MixerModule` has what the layer calls.
        heads: the heads of its output, those that they share, and the width of one, as in
            `LayerKind`; None: those of attention.
        keys_of_heads: the keys that give these two numbers of heads.
        hands_states: whether context parallelism hands its states from piece to piece of a sequence
            (`context_parallel.states`).
        flops: returns the forward FLOPs of a token beside its products with weights, over all
            ranks, and those for each key that it sees; None: there are none.
    """

    declare: Declare
    module: str
    heads: Callable[[ModelConfig], tuple[int, int, int]] | None = None
    keys_of_heads: tuple[str, str] = ("num_attention_heads", "num_query_groups")
    hands_states: bool = False
    flops: Callable[[ModelConfig, LayerKind], tuple[float, float]] | None = None


# A word of `model.layer_types` that is none of attention's is the name of another mixer.
MIXERS = {
    ATTENTION: Mixer(attention, "models.transformer:Attention", flops=flops_of_attention),
    GATED_DELTANET: Mixer(
        gated_deltanet,
        "models.gated_deltanet:GatedDeltaNet",
        lambda model: (model.value_heads, model.key_heads, model.delta_sizes[1]),
        ("delta_value_heads", "delta_key_heads"),
        hands_states=True,
        flops=flops_of_delta,
    ),
}
MLPS: dict[str, Declare] = {DENSE: dense_mlp, EXPERTS: experts}


# Modules of a layer, in the order in which they run.
ORDER = (
    *("input_norm", "attention", "attention_output_norm"),
    *("mlp_norm", "mlp", "mlp_output_norm"),
)


def layer(model: ModelConfig, kind: LayerKind) -> Held:
    """Declares a layer of a kind, in the order in which its modules run."""
    if (survey := survey_of(model)) is not None:
        assert kind.own is not None  # every layer of the model is one of the user's own
        return survey.blocks[kind.own]
    parts = dict.fromkeys(kind.norms, norm(model))
    if kind.mixer is not None:
        parts["attention"] = MIXERS[kind.mixer].declare(model, kind)
    if kind.mlp is not None:
        parts["mlp"] = MLPS[kind.mlp](model, kind)
    held = Held()
    for name in sorted(parts, key=ORDER.index):
        held |= within(name, parts[name])
    return held


def embedding(model: ModelConfig) -> Held:
    """Declares the embedding, with the names that its tensors have in the model."""
    if (survey := survey_of(model)) is not None:
        return survey.embedding
    held = Held()
    if model.position_embedding == "learned":
        dims = Dimension("positions", model.max_positions), hidden_of(model)
        position = FullTensor("embedding.position.weight", dims, std=model.init_std)
        held["position"] = (position,)
    word = _table(model, WORD_EMBEDDING, replicated=model.embedding == "replicated")
    return held | {"word.weight": (word._replace(tied=model.tie_embeddings),)}


def head(model: ModelConfig) -> Held:
    """Declares the head, whose table is a copy of the word embedding if the two are tied."""
    if (survey := survey_of(model)) is not None:
        return survey.head
    table = embedding(model)["word.weight"]
    if not table[0].tied:
        table = (_table(model, "head.weight", replicated=False),)
    return {"table": table, **placed("norm", named("final_norm", norm(model)))}


def _table(model: ModelConfig, name: str, *, replicated: bool) -> FullTensor:
    sizes = model.vocab_size, model.padded_vocab_size
    return vocabulary_table(name, *sizes, hidden_of(model), model.init_std, replicated=replicated)


def parameters_of(model: ModelConfig) -> Iterator[tuple[str, tuple[FullTensor, ...]]]:
    """Yields the local parameters and the states of the whole model, each with its full tensors."""
    for name, tensors in embedding(model).items():
        yield f"embedding.{name}", tensors
    yield from parameters_of_layers(model, range(model.num_layers))
    for name, tensors in head(model).items():
        yield f"head.{name}", tensors


def parameters_of_layers(
    model: ModelConfig, numbers: Iterable[int]
) -> Iterator[tuple[str, tuple[FullTensor, ...]]]:
    """Does the same as `parameters_of` for the layers with these numbers."""
    layers: dict[LayerKind, Held] = {}
    for number in numbers:
        kind = LayerKind.of(model, number)
        if kind not in layers:
            layers[kind] = layer(model, kind)
        yield from within(f"layers.{number}", layers[kind]).items()


def full_tensors(model: ModelConfig) -> Iterator[FullTensor]:
    """Yields the full tensors of the model; a tied table is yielded twice."""
    for _, tensors in parameters_of(model):
        yield from tensors


def full_shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the full shape of each of the model's tensors by name, without vocabulary padding."""
    found: dict[str, tuple[int, ...]] = {}
    for tensor in full_tensors(model):
        found |= dict.fromkeys(tensor.names, tensor.shape)
    return found


def parameter_shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the full shape of each tensor that has gradients (see `full_shapes_of`)."""
    states = states_of(model)
    return {name: s for name, s in full_shapes_of(model).items() if name not in states}


def states_of(model: ModelConfig) -> frozenset[str]:
    """Returns the names of the full tensors that no optimizer updates: the biases of routers."""
    return frozenset(tensor.name for tensor in full_tensors(model) if tensor.is_state)
