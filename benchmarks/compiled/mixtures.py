"""The sizes of layers of experts for which kernels are compiled: presets and other families."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.gpu.rows import read_preset
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import conf_dir

PRESETS = (
    *("olmoe_1b_7b", "qwen3_30b_a3b", "qwen3_235b_a22b", "mixtral_8x7b"),
    *("dots1", "glm_4_5_air"),
)


class Shape(NamedTuple):
    """Sizes of a layer of experts."""

    hidden: int
    width: int
    experts: int
    chosen: int


# Models without a preset: the config.json of each on Hugging Face.
MORE = {
    "Mixtral 8x22B": Shape(6144, 16384, 8, 2),
    "GLM-4.5": Shape(5120, 1536, 160, 8),
    "MiniMax-M2": Shape(3072, 1536, 256, 8),
    "DeepSeek-V2-Lite, Moonlight": Shape(2048, 1408, 64, 6),
    "DeepSeek-V2": Shape(5120, 1536, 160, 6),
    "DeepSeek-V3": Shape(7168, 2048, 256, 8),
    "Kimi K2": Shape(7168, 2048, 384, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
    "Qwen2-57B-A14B": Shape(3584, 2560, 64, 8),
    "Qwen3-Next-80B-A3B": Shape(2048, 512, 512, 10),
}
RANKS = (1, 8)  # ep
TOKENS = 4096  # tokens of a rank


def shapes() -> dict[str, Shape]:
    """Returns the layers of all presets with experts, and of models without a preset."""
    found = {}
    for name in PRESETS:
        model = ModelConfig(**read_preset(conf_dir() / "model" / f"{name}.yaml"))
        sizes = model.hidden_size, model.expert_size, model.num_experts, model.experts_per_token
        found[name] = Shape(*sizes)
    return found | MORE
