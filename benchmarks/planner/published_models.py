"""Shapes of models that published rows only name."""

from __future__ import annotations

Shape = dict[str, float]


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Shape:
    """GPT-2's block: two MLP matrices of 4 × hidden, the table tied to the head."""
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "ffn": 4 * hidden}


def llama(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, head_size: int = 0
) -> Shape:
    """Llama's block: three MLP matrices, grouped keys, an untied head."""
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv,
        "head_size": head_size or hidden // heads,
        "ffn": ffn,
        "vocab": vocab,
        "gated": 1,
        "tied": 0,
    }


def moe(
    shape: Shape, experts: int, chosen: int, ffn: int, shared: int = 0, dense_layers: int = 0
) -> Shape:
    """The same with experts of width `ffn`, `chosen` of them for a token, in all layers but the
    first `dense_layers`, which have the shape's own MLP. `shared`: width of the shared expert."""
    sparse = 1 - dense_layers / shape["layers"]
    made = {"experts": experts, "active_experts": chosen, "expert_ffn": ffn, "shared_ffn": shared}
    return {**shape, **made, "sparse": sparse}


# DeepSeek-V3's attention: heads of 128 + 64 for queries and keys, and of 128 for values.
_LATENT: Shape = {
    "q_latent": 1536,
    "kv_latent": 512,
    "rope_size": 64,
    "value_size": 128,
    "head_size": 160,
}


_HALF_128: Shape = {"window": 128, "sliding": 0.5}  # every other layer sees 128 keys

# The shapes follow the models' own published configurations. Hybrids of Mamba and attention
# (Nemotron 3) count as a plain decoder with the printed active parameters, and DeepSeek-V4 without
# its sparse attention: they are in no score.
MODELS: dict[str, Shape] = {
    "LLAMA2-7B": llama(32, 4096, 32, 32, 11008, 32000),
    "LLAMA2-13B": llama(40, 5120, 40, 40, 13824, 32000),
    "LLAMA2-70B": llama(80, 8192, 64, 8, 28672, 32000),
    "LLAMA3-8B": llama(32, 4096, 32, 8, 14336, 128256),
    "LLAMA3-70B": llama(80, 8192, 64, 8, 28672, 128256),
    "LLAMA3-405B": llama(126, 16384, 128, 8, 53248, 128256),
    "GPT3-5B": gpt(24, 4096, 32),
    "GPT3-20B": gpt(44, 6144, 48),
    "GPT3-175B": gpt(96, 12288, 96),
    "Nemotron-8B": gpt(32, 4096, 32, 256000),
    "Nemotron-22B": gpt(40, 6144, 48, 256000),
    "SmolLM-1.7B": llama(24, 2048, 32, 32, 8192, 49152),
    "DeepSeekV3": moe(
        llama(61, 7168, 128, 128, 18432, 129280) | _LATENT, 256, 8, 2048, 2048, dense_layers=3
    ),
    "Kimi_K2": moe(
        llama(61, 7168, 64, 64, 18432, 163840) | _LATENT, 384, 8, 2048, 2048, dense_layers=1
    ),
    "Mixtral-8x22B": moe(llama(56, 6144, 48, 8, 16384, 32768), 8, 2, 16384),
    "Qwen3_30B_a3B": moe(llama(48, 2048, 32, 4, 768, 151936, 128), 128, 8, 768),
    "Qwen3_235B_a22B": moe(llama(94, 4096, 64, 4, 1536, 151936, 128), 128, 8, 1536),
    "GPT OSS 20B": moe(llama(24, 2880, 64, 8, 2880, 201088, 64), 32, 4, 2880) | _HALF_128,
    "GPT OSS 120B": moe(llama(36, 2880, 64, 8, 2880, 201088, 64), 128, 4, 2880) | _HALF_128,
    "Nemotron_3_Nano": moe(llama(52, 2688, 32, 2, 1856, 131072, 128), 128, 4, 1856),
    "Nemotron_3_Super": moe(llama(88, 4096, 32, 2, 2688, 131072, 128), 256, 4, 2688),
    "Nemotron_3_Ultra": moe(llama(108, 8192, 64, 8, 4096, 131072, 128), 512, 5, 4096),
    "Nemotron_3_5_Lightning": moe(llama(52, 2688, 32, 2, 1856, 131072, 128), 128, 4, 1856),
    "DeepSeekV4 Flash": moe(llama(43, 4096, 64, 1, 2048, 129280, 512), 256, 6, 2048, 2048),
}
_ALIASES = {
    "Llama 3.1 8B": "LLAMA3-8B",
    "Llama 3.1 70B": "LLAMA3-70B",
    "Llama 3.1 405B": "LLAMA3-405B",
    "LLAMA3_70B": "LLAMA3-70B",
    "LLAMA3.1_405B": "LLAMA3-405B",
    "Llama 3 405B": "LLAMA3-405B",
    "LLaMA-2-7B": "LLAMA2-7B",
}


def named(name: str) -> Shape:
    """Returns the shape of a model by its name; KeyError for an unknown one."""
    return MODELS[_ALIASES.get(name, name)]


def unnamed(row: dict[str, object]) -> str:
    """Returns the model of a row without its name, by the layouts that later tables print with one:
    those with experts by the number of their groups, of GPUs and of samples."""
    expert = int(str(row.get("ep") or 1).split()[0]) if str(row.get("ep")) != "n/a" else 1
    gpus, batch = int(str(row["gpus"])), int(str(row["global_batch"]))
    if expert == 1:
        return "LLAMA3-405B" if gpus >= 128 and batch != 128 else "LLAMA3-70B"
    if gpus <= 16:
        return "Qwen3_30B_a3B"
    if gpus == 64:
        return "GPT OSS 120B" if row.get("precision") == "BF16" else "Qwen3_235B_a22B"
    qwen = gpus == 256 and (batch == 8192 or row.get("tp") == 2)
    return "Qwen3_235B_a22B" if qwen else "DeepSeekV3"
