"""Which tensor of a Hugging Face checkpoint holds which of ours: names alone, no torch.

Llama (`LlamaForCausalLM`), Qwen2 and Qwen3 name their tensors alike and keep q, k and v apart, as
we do. GPT-2 (`GPT2LMHeadModel`) joins and transposes them (its layers are `Conv1D`, whose weight is
(inputs, outputs)). Rotary dimensions are paired (d, d + r/2) there as here, so no row moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.schema import ModelConfig

LLAMA, QWEN2, QWEN3, GPT2 = "llama", "qwen2", "qwen3", "gpt2"
ARCHITECTURES = {
    LLAMA: "LlamaForCausalLM",
    QWEN2: "Qwen2ForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
    GPT2: "GPT2LMHeadModel",
}
HEAD = "lm_head.weight"
EMBEDDINGS = dict.fromkeys((LLAMA, QWEN2, QWEN3), "model.embed_tokens.weight")
EMBEDDINGS[GPT2] = "transformer.wte.weight"


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face checkpoint.

    Attributes:
        name: transformers' name, `model.layers.0.self_attn.q_proj.weight`.
        parts: our logical tensors, one below the other (joined along dimension 0).
        shape: of the tensor in the file.
        transposed: the file holds the transpose of the joined parts.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False


def hf_tensors(model: ModelConfig, kind: str) -> list[HFTensor]:
    """Every tensor of `model` in the format `kind` ("llama", "gpt2" …), in the order of the layers.

    A tied head is left out, as transformers leaves it out.
    """
    tensors = _gpt2(model) if kind == GPT2 else _llama(model)
    if not model.tie_embeddings:
        shape = (model.vocab_size, model.hidden_size)
        tensors.append(HFTensor(HEAD, ("head.weight",), shape))
    return tensors


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our logical tensors with their full shapes, vocabulary without padding."""
    hidden, ffn = model.hidden_size, model.ffn_size
    queries, keys = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
    linears = {
        "attention.q": (queries, hidden),
        "attention.k": (keys, hidden),
        "attention.v": (keys, hidden),
        "attention.out": (hidden, queries),
        "mlp.up": (ffn, hidden),
        "mlp.down": (hidden, ffn),
    }
    if model.activation == "swiglu":
        linears["mlp.gate"] = (ffn, hidden)
    has_bias = dict.fromkeys(linears, model.bias)
    has_bias |= dict.fromkeys(("attention.q", "attention.k", "attention.v"), model.qkv_bias)
    has_bias["attention.out"] = model.out_bias
    vectors = ("weight", "bias") if model.norm == "layernorm" else ("weight",)

    shapes: dict[str, tuple[int, ...]] = {"embedding.word.weight": (model.vocab_size, hidden)}
    if model.position_embedding == "learned":
        shapes["embedding.position.weight"] = (model.max_positions, hidden)
    for layer in range(model.num_layers):
        for norm in ("input_norm", "mlp_norm"):
            shapes |= {f"layers.{layer}.{norm}.{part}": (hidden,) for part in vectors}
        for name, shape in linears.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
            if has_bias[name]:
                shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
        if model.qk_norm:
            for part in ("q", "k"):
                shapes[f"layers.{layer}.attention.{part}_norm.weight"] = (model.head_size,)
    shapes |= {f"final_norm.{part}": (hidden,) for part in vectors}
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab_size, hidden)
    return shapes


def _llama(model: ModelConfig) -> list[HFTensor]:
    shapes = logical_shapes(model)
    names = {"embedding.word.weight": EMBEDDINGS[LLAMA]}
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        names[f"{ours}.input_norm.weight"] = f"{theirs}.input_layernorm.weight"
        for part in ("weight", "bias"):
            for short, long in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o")):
                names[f"{ours}.attention.{short}.{part}"] = f"{theirs}.self_attn.{long}_proj.{part}"
        for part in ("q_norm", "k_norm"):
            names[f"{ours}.attention.{part}.weight"] = f"{theirs}.self_attn.{part}.weight"
        names[f"{ours}.mlp_norm.weight"] = f"{theirs}.post_attention_layernorm.weight"
        for part in ("weight", "bias"):
            for short in ("gate", "up", "down"):
                names[f"{ours}.mlp.{short}.{part}"] = f"{theirs}.mlp.{short}_proj.{part}"
    names["final_norm.weight"] = "model.norm.weight"
    return [HFTensor(name, (ours,), shapes[ours]) for ours, name in names.items() if ours in shapes]


def _gpt2(model: ModelConfig) -> list[HFTensor]:
    shapes = logical_shapes(model)
    tensors = [
        HFTensor(EMBEDDINGS[GPT2], ("embedding.word.weight",), ()),
        HFTensor("transformer.wpe.weight", ("embedding.position.weight",), ()),
    ]
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"

        def both(
            name: str, *parts: str, conv: bool = True, ours: str = ours, theirs: str = theirs
        ) -> list[HFTensor]:
            return [
                HFTensor(
                    f"{theirs}.{name}.{kind}",
                    tuple(f"{ours}.{part}.{kind}" for part in parts),
                    (),
                    transposed=conv and kind == "weight",
                )
                for kind in ("weight", "bias")
            ]

        tensors += both("ln_1", "input_norm", conv=False)
        tensors += both("attn.c_attn", "attention.q", "attention.k", "attention.v")
        tensors += both("attn.c_proj", "attention.out")
        tensors += both("ln_2", "mlp_norm", conv=False)
        tensors += both("mlp.c_fc", "mlp.up")
        tensors += both("mlp.c_proj", "mlp.down")
    tensors += [
        HFTensor(f"transformer.ln_f.{kind}", (f"final_norm.{kind}",), ())
        for kind in ("weight", "bias")
    ]
    return [_shaped(tensor, shapes) for tensor in tensors]


def _shaped(tensor: HFTensor, shapes: dict[str, tuple[int, ...]]) -> HFTensor:
    """The tensor with its shape in the file, which follows from its parts."""
    rows = sum(shapes[part][0] for part in tensor.parts)
    shape = (rows, *shapes[tensor.parts[0]][1:])
    return HFTensor(
        tensor.name, tensor.parts, shape[::-1] if tensor.transposed else shape, tensor.transposed
    )
