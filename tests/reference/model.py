"""The transformer in plain torch modules, one matrix per projection, one step per formula.

`named_parameters()` yields exactly the logical names of parallel3d (`layers.0.attention.q.weight`),
so that weights go in and out as a dictionary. Slow and obvious on purpose: softmax attention is
spelled out, RoPE is a complex multiplication, the loss is a log-sum-exp over the real vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tests.reference.dropout import dropped
from tests.reference.mlp import MLP, Experts, Routing


class ModelShape(Protocol):
    """The fields of a model configuration that define the function it computes."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None
    head_dim: int | None
    ffn_hidden_size: int | None
    seq_length: int
    max_position_embeddings: int | None
    vocab_size: int
    norm: str
    norm_eps: float
    position_embedding: str
    rotary_percent: float
    rotary_base: float
    rope_scaling_factor: float
    rope_low_freq_factor: float
    rope_high_freq_factor: float
    rope_original_length: int
    qk_norm: bool
    qk_norm_width: str
    activation: str
    bias: bool
    attention_bias: str | None
    tie_embeddings: bool
    num_experts: int
    experts_per_token: int
    expert_ffn_size: int | None
    shared_expert_size: int
    shared_expert_gate: bool
    router_score: str
    router_normalize: bool
    router_scale: float
    router_bias: bool
    router_groups: int
    router_top_groups: int
    dense_layers: Sequence[int]
    layer_types: Sequence[str]
    sliding_window: int | None
    sliding_rotary_base: float | None


@dataclass(frozen=True)
class Dropping:
    """Dropout with probability p for the given samples of a run."""

    p: float
    seed: int
    samples: Sequence[int]

    def __call__(self, x: Tensor, site: str) -> Tensor:
        return dropped(x, self.samples, self.p, self.seed, site)


NO_DROPOUT = Dropping(0.0, 0, ())


@dataclass(frozen=True)
class Packing:
    """The tokens of a batch that may attend to each other, and their positions in their documents.

    `unseen[i, q, k]`, a plain square for each sample: query q does not read key k. `positions[i,
    p]` counts the tokens of p's document before p.
    """

    unseen: Tensor
    positions: Tensor

    @classmethod
    def of(cls, starts: Sequence[Sequence[int] | None], length: int) -> Packing:
        """Makes it from the positions at which the tokens' documents begin; None: one document."""
        unseen, positions = [], []
        for begins in starts:
            of_token = [0] * length if begins is None else [int(begin) for begin in begins]
            unseen.append(
                [
                    [k > q or of_token[k] != of_token[q] for k in range(length)]
                    for q in range(length)
                ]
            )
            place = []
            for p in range(length):
                same = p > 0 and of_token[p] == of_token[p - 1]
                place.append(place[-1] + 1 if same else 0)
            positions.append(place)
        return cls(torch.tensor(unseen), torch.tensor(positions))


# Options in which families of models differ, at their defaults: shapes that are older than an
# option lack it.
PLAIN: Mapping[str, Any] = {
    "qk_norm_width": "head",
    "attention_gate": False,
    "attention_sinks": False,
    "norm_position": "before",
    "norm_zero_centered": False,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention_scale": None,
    "attention_logit_cap": None,
    "logit_scale": 1.0,
    "logit_cap": None,
    "layer_types": (),
    "delta_key_heads": None,
    "delta_value_heads": None,
    "delta_key_size": None,
    "delta_value_size": None,
    "delta_convolution": 4,
    "delta_negative": False,
    "sliding_rotary_base": None,
    "rope_scaling": "llama3",
    "query_temperature": 0.0,
    "sliding_heads": None,
    "absent": (),
}


def option(shape: ModelShape, name: str) -> Any:
    """Returns an option of a shape, or its default."""
    return getattr(shape, name, PLAIN[name])


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019), or · (1 + weight) (Gemma)."""

    def __init__(self, size: int, shape: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = shape.norm_eps
        self.adds_one = option(shape, "norm_zero_centered")

    def forward(self, x: Tensor) -> Tensor:
        root_mean_square = (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()
        normed = x / root_mean_square
        return normed + normed * self.weight if self.adds_one else normed * self.weight


def make_norm(shape: ModelShape) -> nn.Module:
    """Returns the norm that the configuration names."""
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.hidden_size, eps=shape.norm_eps)
    assert shape.norm == "rmsnorm", shape.norm
    return RMSNorm(shape.hidden_size, shape)


def frequencies(shape: ModelShape, pairs: int, tokens: int) -> list[float]:
    """Returns radians per position for each pair of dimensions, in a document of `tokens`."""
    plain = [shape.rotary_base ** (-d / pairs) for d in range(pairs)]
    kind, factor = option(shape, "rope_scaling"), shape.rope_scaling_factor
    if kind == "linear":
        return [frequency / factor for frequency in plain]
    if kind == "yarn":
        return yarn_frequencies(shape, plain)
    if kind == "longrope":
        longer = tokens > shape.rope_original_length
        divisors = shape.rope_long_factors if longer else shape.rope_short_factors
        return [frequency / by for frequency, by in zip(plain, divisors, strict=True)]
    assert kind == "llama3", kind
    return llama3_frequencies(shape, pairs)


def lengths(places: Sequence[int]) -> list[int]:
    """Returns the number of tokens of each token's document; `places` counts from 0 in each."""
    found: list[int] = []
    for i, place in enumerate(places):
        if i + 1 == len(places) or places[i + 1] <= place:
            found += [place + 1] * (place + 1)
    return found


def yarn_frequencies(shape: ModelShape, plain: Sequence[float]) -> list[float]:
    """Mixes plain and divided frequencies by the number of the pair (Peng et al. 2023).

    The ramp begins where base^(-d / pairs) · original is 2π · beta_fast, and ends where it is
    2π · beta_slow.
    """
    ends = []
    for turns in (shape.rope_beta_fast, shape.rope_beta_slow):
        angle = 2 * math.pi * turns / shape.rope_original_length
        ends.append(-len(plain) * math.log(angle, shape.rotary_base))
    begin, end = ends
    if shape.rope_truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, 2 * len(plain) - 1)
    if begin == end:
        end += 0.001
    found = []
    for pair, frequency in enumerate(plain):
        divided = min(max((pair - begin) / (end - begin), 0.0), 1.0)
        mixed = divided / shape.rope_scaling_factor + (1 - divided)
        found.append(frequency * mixed)
    return found


def attention_factor(shape: ModelShape) -> float:
    """Returns the factor by which q and k grow in the rotation."""
    kind = option(shape, "rope_scaling")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if shape.rope_attention_factor is not None:
        return shape.rope_attention_factor
    if kind == "yarn":
        return 1 + math.log(shape.rope_scaling_factor) / 10
    return (1 + math.log(shape.rope_scaling_factor, shape.rope_original_length)) ** 0.5


def llama3_frequencies(shape: ModelShape, pairs: int) -> list[float]:
    """Scales frequencies like in Llama 3.1: wavelengths beyond original / low grow by the factor,
    those below original / high stay, and in between the two frequencies are mixed."""
    found = []
    for d in range(pairs):
        frequency = shape.rotary_base ** (-d / pairs)
        wavelength = 2 * math.pi / frequency
        original, factor = shape.rope_original_length, shape.rope_scaling_factor
        low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
        if factor == 1 or wavelength < original / high:
            found.append(frequency)
        elif wavelength > original / low:
            found.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append((1 - smooth) * frequency / factor + smooth * frequency)
    return found


def rotate(
    x: Tensor, shape: ModelShape, positions: Tensor | None = None, base: float | None = None
) -> Tensor:
    """Applies RoPE (Su et al. 2021): dimensions d and d + rot/2, one complex number, turn by the
    position.

    `x` is (batch, heads, sequence, head_dim). The first `rot` dimensions of each head turn, where
    rot is head_dim · rotary_percent rounded down to an even number; the others pass. `positions`
    are (batch, sequence); None: 0, 1, 2 … `base`: plain frequencies of this base instead of the
    configuration's.
    """
    head_dim = x.shape[-1]
    pairs = int(head_dim * shape.rotary_percent) // 2
    turning, passing = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if positions is None:
        positions = torch.arange(x.shape[-2]).expand(x.shape[0], -1)
    rows = []
    for places in positions.tolist():
        sizes = lengths(places)
        of_size = {
            tokens: frequencies(shape, pairs, tokens)
            if base is None
            else [base ** (-d / pairs) for d in range(pairs)]
            for tokens in set(sizes)
        }
        rows.append([of_size[tokens] for tokens in sizes])
    angle = positions.double().unsqueeze(-1) * torch.tensor(rows, dtype=torch.float64)
    turn = torch.complex(angle.cos().to(x.dtype), angle.sin().to(x.dtype)).unsqueeze(1)
    if base is None:
        turn = turn * attention_factor(shape)
    turned = torch.complex(turning[..., :pairs], turning[..., pairs:]) * turn
    return torch.cat([turned.real, turned.imag, passing], dim=-1)


class Attention(nn.Module):
    """Causal attention with grouped key/value heads, written out.

    `word` is the layer's kind. In a sliding layer a token attends to at most `sliding_window`
    tokens, itself included; a layer without positions does not rotate.
    """

    def __init__(self, shape: ModelShape, word: str = "full") -> None:
        super().__init__()
        self.shape = shape
        self.slides = word.startswith("sliding")
        self.rotates = shape.position_embedding == "rope" and not word.endswith("nope")
        self.heads = shape.num_attention_heads
        self.kv_heads = shape.num_query_groups or shape.num_attention_heads
        self.head_dim = shape.head_dim or shape.hidden_size // self.heads
        if self.slides and option(shape, "sliding_heads") is not None:
            self.heads, self.kv_heads, self.head_dim = option(shape, "sliding_heads")
        kv_size = self.kv_heads * self.head_dim
        kind = shape.attention_bias or ("all" if shape.bias else "none")
        inner, outer = kind in ("qkv", "all"), kind == "all"
        self.q = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=inner)
        self.k = nn.Linear(shape.hidden_size, kv_size, bias=inner)
        self.v = nn.Linear(shape.hidden_size, kv_size, bias=inner)
        self.out = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=outer)
        self.is_gated = option(shape, "attention_gate")
        if self.is_gated:
            self.gate = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=inner)
        self.has_sinks = option(shape, "attention_sinks")
        if self.has_sinks:
            self.sinks = nn.Parameter(torch.empty(self.heads))
        self.norm_width = option(shape, "qk_norm_width")
        if shape.qk_norm:
            full = self.norm_width == "full"
            heads, kv_heads = (self.heads, self.kv_heads) if full else (1, 1)
            self.q_norm = RMSNorm(heads * self.head_dim, shape)
            self.k_norm = RMSNorm(kv_heads * self.head_dim, shape)

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """Turns (batch, sequence, heads·head_dim) into (batch, heads, sequence, head_dim)."""
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        drop: Dropping = NO_DROPOUT,
        name: str = "",
        packing: Packing | None = None,
    ) -> Tensor:
        packing = packing or Packing.of([None] * x.shape[0], x.shape[1])
        q, k = self.q(x), self.k(x)
        if self.shape.qk_norm and self.norm_width == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = self.split_heads(q, self.heads)
        k = self.split_heads(k, self.kv_heads)
        v = self.split_heads(self.v(x), self.kv_heads)
        if self.shape.qk_norm and self.norm_width == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            base = option(self.shape, "sliding_rotary_base") if self.slides else None
            q, k = (rotate(x, self.shape, packing.positions, base) for x in (q, k))
        unseen = packing.unseen
        if self.slides:
            length, far = x.shape[1], self.shape.sliding_window
            passed = [[q - k >= far for k in range(length)] for q in range(length)]
            unseen = unseen | torch.tensor(passed)
        if option(self.shape, "query_temperature"):
            # Ministral 3: the factor of q grows by a step with each further original length.
            periods = packing.positions.to(q.dtype).div(self.shape.rope_original_length).floor()
            heat = 1 + self.shape.query_temperature * torch.log(1 + periods)
            q = q * heat[:, None, :, None]
        group = self.heads // self.kv_heads
        scale = option(self.shape, "attention_scale") or 1 / math.sqrt(self.head_dim)
        # One head after the other: query head h reads key/value head h // group.
        every_head = []
        for h in range(self.heads):
            keys = k[:, h // group]
            scores = q[:, h] @ keys.transpose(-1, -2) * scale
            if (cap := option(self.shape, "attention_logit_cap")) is not None:
                scores = cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(unseen, -math.inf)
            if self.has_sinks:  # a further key, whose value is 0
                sink = self.sinks[h].expand(*scores.shape[:-1], 1)
                scores = torch.cat([scores, sink], dim=-1)
            every_head.append(scores.softmax(dim=-1)[..., : x.shape[1]])
        weights = drop(torch.stack(every_head, dim=1), f"{name}.probabilities")
        outputs = torch.cat([weights[:, h] @ v[:, h // group] for h in range(self.heads)], dim=-1)
        if self.is_gated:  # each number of each head has a gate of its own
            outputs = outputs / (1 + torch.exp(-self.gate(x)))
        return self.out(outputs)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (Yang et al. 2025), one token after the other."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.key_heads = option(shape, "delta_key_heads") or shape.num_attention_heads
        self.value_heads = option(shape, "delta_value_heads") or self.key_heads
        head_dim = shape.head_dim or hidden // shape.num_attention_heads
        self.key_size = option(shape, "delta_key_size") or head_dim
        self.value_size = option(shape, "delta_value_size") or self.key_size
        self.reads = option(shape, "delta_convolution")
        self.most = 2 if option(shape, "delta_negative") else 1
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        for name, width in (("q", keys), ("k", keys), ("v", values)):
            self.add_module(name, nn.Linear(hidden, width, bias=False))
            self.add_module(f"{name}_conv", nn.Linear(self.reads, width, bias=False))
        self.z = nn.Linear(hidden, values, bias=False)
        self.a = nn.Linear(hidden, self.value_heads, bias=False)
        self.b = nn.Linear(hidden, self.value_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.o_norm = nn.LayerNorm(self.value_size, bias=False)  # holds the weight alone
        self.eps = shape.norm_eps
        self.out = nn.Linear(values, hidden, bias=False)

    def convolved(self, name: str, x: Tensor, places: Tensor) -> Tensor:
        """Returns SiLU of each channel's sum over a token and those before it in its document."""
        taps: Tensor = getattr(self, f"{name}_conv").weight
        projected, every = getattr(self, name)(x), []
        for t in range(x.shape[1]):
            total = taps[:, -1] * projected[:, t]
            for n in range(1, min(t + 1, self.reads)):
                reads = (places[:, t] >= n).unsqueeze(-1)
                total = total + torch.where(reads, taps[:, -1 - n] * projected[:, t - n], 0.0)
            every.append(total / (1 + torch.exp(-total)))
        return torch.stack(every, dim=1)

    def forward(
        self,
        x: Tensor,
        drop: Dropping = NO_DROPOUT,
        name: str = "",
        packing: Packing | None = None,
    ) -> Tensor:
        packing = packing or Packing.of([None] * x.shape[0], x.shape[1])
        places = packing.positions
        q, k = (
            self.convolved(part, x, places).unflatten(-1, (self.key_heads, -1)) for part in "qk"
        )
        v = self.convolved("v", x, places).unflatten(-1, (self.value_heads, -1))
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        q = q / math.sqrt(self.key_size)
        decay = torch.exp(-self.A_log.exp() * torch.log(1 + torch.exp(self.a(x) + self.dt_bias)))
        rate = self.most / (1 + torch.exp(-self.b(x)))
        z = self.z(x).unflatten(-1, (self.value_heads, -1))
        each = self.value_heads // self.key_heads
        every_head = []
        for h in range(self.value_heads):
            state = x.new_zeros(x.shape[0], self.key_size, self.value_size)
            outputs = []
            for t in range(x.shape[1]):
                begins = (places[:, t] == 0)[:, None, None]
                state = torch.where(begins, 0.0, state) * decay[:, t, h, None, None]
                key, query = k[:, t, h // each, :, None], q[:, t, h // each, :, None]
                error = v[:, t, h, :, None] - state.mT @ key
                state = state + rate[:, t, h, None, None] * key @ error.mT
                outputs.append((state.mT @ query).squeeze(-1))
            y = torch.stack(outputs, dim=1)
            y = y / (y.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.o_norm.weight
            every_head.append(y * z[:, :, h] / (1 + torch.exp(-z[:, :, h])))
        return self.out(torch.cat(every_head, dim=-1))


def has_experts(shape: ModelShape, layer: int) -> bool:
    """Returns whether a layer, counted from 0, has experts instead of an ordinary MLP."""
    # Configurations that are older than experts lack the key.
    return getattr(shape, "num_experts", 0) > 0 and layer not in shape.dense_layers


# Half of a layer → its norms.
NORMS_OF = {
    "attention": ("input_norm", "attention_output_norm"),
    "mlp": ("mlp_norm", "mlp_output_norm"),
}


class Block(nn.Module):
    """A transformer layer, with norms before attention and MLP, after them, or both."""

    def __init__(self, shape: ModelShape, number: int) -> None:
        super().__init__()
        self.number = number
        self.residual_scale = option(shape, "residual_scale")
        place = option(shape, "norm_position")
        assert place in ("before", "after", "both"), place
        if place in ("before", "both"):
            self.input_norm = make_norm(shape)
            self.mlp_norm = make_norm(shape)
        if place in ("after", "both"):
            self.attention_output_norm = make_norm(shape)
            self.mlp_output_norm = make_norm(shape)
        words = option(shape, "layer_types") or ["full"]
        word = words[number % len(words)]
        mixer = GatedDeltaNet(shape) if word == "gated_deltanet" else Attention(shape, word)
        self.attention = mixer
        self.mlp = Experts(shape) if has_experts(shape, number) else MLP(shape)
        absent = dict(option(shape, "absent")).get(number)  # a half of the layer
        for name in (absent, *NORMS_OF[absent]) if absent is not None else ():
            if hasattr(self, name):
                delattr(self, name)

    def forward(
        self, x: Tensor, drop: Dropping, packing: Packing, routed: dict[int, Routing]
    ) -> Tensor:
        """Records the choice of its experts in `routed`, if it has any."""
        name = f"layers.{self.number}"
        if hasattr(self, "attention"):
            given = self.normed("input_norm", x)
            attended = self.attention(given, drop, f"{name}.attention", packing)
            attended = drop(self.normed("attention_output_norm", attended), f"{name}.attention")
            x = x + self.residual_scale * attended
        if not hasattr(self, "mlp"):
            return x
        changed = self.mlp(self.normed("mlp_norm", x))
        if isinstance(self.mlp, Experts):
            changed, routed[self.number] = changed
        changed = drop(self.normed("mlp_output_norm", changed), f"{name}.mlp")
        return x + self.residual_scale * changed

    def normed(self, norm: str, x: Tensor) -> Tensor:
        """Returns x, through the norm of this name if the layer has it."""
        return getattr(self, norm)(x) if hasattr(self, norm) else x


class ReferenceModel(nn.Module):
    """Maps tokens (batch, sequence) to logits (batch, sequence, vocab_size), without a padded
    vocabulary."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding_scale = option(shape, "embedding_scale")
        self.logit_scale = option(shape, "logit_scale")
        self.logit_cap = option(shape, "logit_cap")
        self.embedding = nn.ModuleDict({"word": nn.Embedding(shape.vocab_size, shape.hidden_size)})
        if shape.position_embedding == "learned":
            positions = shape.max_position_embeddings or shape.seq_length
            self.embedding["position"] = nn.Embedding(positions, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, number) for number in range(shape.num_layers))
        self.final_norm = make_norm(shape)
        if not shape.tie_embeddings:
            self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        drop: Dropping = NO_DROPOUT,
        packing: Packing | None = None,
        routed: dict[int, Routing] | None = None,
    ) -> Tensor:
        """`packing` None: a sample is one document. `routed` gets the routing of each layer."""
        routed = {} if routed is None else routed
        packing = packing or Packing.of([None] * tokens.shape[0], tokens.shape[1])
        x = self.embedding["word"](tokens) * self.embedding_scale
        if "position" in self.embedding:
            x = x + self.embedding["position"](packing.positions)
        x = drop(x, "embedding")
        for layer in self.layers:
            x = layer(x, drop, packing, routed)
        x = self.final_norm(x)
        logits = self.head(x) if hasattr(self, "head") else x @ self.embedding["word"].weight.T
        logits = logits * self.logit_scale
        if self.logit_cap is None:
            return logits
        return self.logit_cap * torch.tanh(logits / self.logit_cap)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of each token in nats.

    Logits (batch, sequence, vocab); labels and result (batch, sequence).
    """
    target = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return logits.logsumexp(dim=-1) - target


def objective_losses(
    logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float
) -> Tensor:
    """Returns the training loss of each token: cross-entropy against a smoothed target, plus
    z-loss.

    The target gives every token of the vocabulary label_smoothing / vocab, and the label the rest.
    z-loss: z_loss · (log Σ exp logits)². Shapes as in `token_losses`.
    """
    vocab = logits.shape[-1]
    target = torch.full_like(logits, label_smoothing / vocab)
    target.scatter_(-1, labels.unsqueeze(-1), 1 - label_smoothing + label_smoothing / vocab)
    log_sum = logits.logsumexp(dim=-1, keepdim=True)
    return (target * (log_sum - logits)).sum(dim=-1) + z_loss * log_sum.squeeze(-1) ** 2
