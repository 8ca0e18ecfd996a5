"""Maps the experts of Hugging Face models to ours: module names and keys of config.json.

On disk, each expert has its own tensors in our format and in the one that transformers writes by
default. transformers 5 can also write the tensors that it has in memory, which join all experts of
a layer. This module neither imports torch nor opens files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel3d.checkpoint.hf.families import ExpertNames, Family
from parallel3d.checkpoint.hf.read_keys import Keys
from parallel3d.models.keys import ModelConfig

CHOSEN, NORMALIZES = "num_experts_per_tok", "norm_topk_prob"
PUBLISHED_CHOSEN = "experts_per_token"  # OpenAI's key, which transformers does not read
LISTED, STEP = "mlp_only_layers", "decoder_sparse_step"
AUX = "router_aux_loss_coef"
LIMIT = "swiglu_limit"
MTP = "num_nextn_predict_layers"
PARTS = ("gate", "up", "down")


# Names in transformers' memory: (experts, gate rows and up rows, inputs), (experts, rows, inputs).
JOINED_BLOCK = "mlp"
JOINED = {"gate": ("gate_up_proj", 0, 2), "up": ("gate_up_proj", 1, 2), "down": ("down_proj", 0, 1)}


class Place(NamedTuple):
    """Says where a file holds a tensor.

    Attributes:
        key: name in the file.
        expert: number of the expert if the file joins all experts of a layer, or else None.
        part: number of the tensor among the `parts` that the file joins along an expert's rows.
        parts: number of tensors that are so joined.
    """

    key: str
    expert: int | None = None
    part: int = 0
    parts: int = 1

    def shape(self, own: tuple[int, ...], experts: int) -> tuple[int, ...]:
        """Returns the shape in the file of a tensor whose own shape is `own`."""
        if self.expert is None:
            return own
        return (experts, own[0] * self.parts, *own[1:])


def joined_place(name: str, names: ExpertNames) -> Place | None:
    """Returns the place in a file with the names of transformers' memory.

    `name` is a name in transformers' default format. The result is None if the names are the same.
    """
    layer, block, rest = name.partition(f".{names.block}.")
    found = re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", rest)
    if found is None:
        same = not block or names.block == JOINED_BLOCK
        return None if same else Place(f"{layer}.{JOINED_BLOCK}.{rest}")
    theirs, part, parts = JOINED[PARTS[names.parts.index(found[2])]]
    return Place(f"{layer}.{JOINED_BLOCK}.experts.{theirs}", int(found[1]), part, parts)


def modules_of(names: ExpertNames, count: int) -> dict[str, str]:
    """Maps transformers' modules to ours for a layer with `count` experts.

    In transformers' names, {} stands for the number of the layer.
    """
    block = f"model.layers.{{}}.{names.block}"
    found = {f"{block}.{names.router}": "mlp.router"}
    if names.shared is not None:
        for theirs, ours in zip(names.parts, PARTS, strict=True):
            found[f"{block}.{names.shared}.{theirs}"] = f"mlp.shared.{ours}"
        if names.gated:
            found[f"{block}.{names.shared}_gate"] = "mlp.shared_gate"
    for number in range(0 if names.joined else count):
        for theirs, ours in zip(names.parts, PARTS, strict=True):
            found[f"{block}.experts.{number}.{theirs}"] = f"mlp.experts.{number}.{ours}"
    return found


def read_experts(keys: Keys, family: Family, layers: int) -> dict[str, Any]:
    """Returns our keys for the experts. Raises UserError if our model cannot express a value."""
    names, defaults = family.experts, family.defaults
    assert names is not None

    def number(key: str) -> int:
        value = keys.get(key, defaults.get(key), int)
        if value is None:
            raise keys.error(key, None, "it must be a whole number")
        return int(value)

    normalizes = names.normalizes
    if normalizes is None:
        normalizes = keys.get(NORMALIZES, defaults.get(NORMALIZES, False), bool)
    found: dict[str, Any] = {
        "num_experts": number(names.count),
        "experts_per_token": number(CHOSEN),
        "router_score": names.score,
        "router_normalize": normalizes,
        "router_bias": names.choice_bias is not None,
        "dense_layers": _dense_layers(keys, family, layers),
    }
    if names.joined:
        chosen = found["experts_per_token"]
        keys.require(PUBLISHED_CHOSEN, (chosen,), chosen)
        limit = keys.get(LIMIT, defaults[LIMIT], float)
        if limit <= 0:
            raise keys.error(LIMIT, limit, "it must be above 0")
        found |= {"expert_bias": True, "router_logit_bias": True, "swiglu_limit": float(limit)}
    if found["num_experts"] < 1:
        raise keys.error(names.count, found["num_experts"], "it must be at least 1")
    width = None
    if names.width != "intermediate_size":
        width = found["expert_ffn_size"] = number(names.width)
    if names.shared is not None:
        shared = number(names.shared_width)
        if shared < 1:
            raise keys.error(names.shared_width, shared, "it must be at least 1")
        found["shared_expert_size"] = shared * (width or 1) if names.shared_in_experts else shared
        found["shared_expert_gate"] = names.gated
    if names.grouped:
        found["router_groups"], found["router_top_groups"] = number("n_group"), number("topk_group")
        scale = keys.get("routed_scaling_factor", defaults["routed_scaling_factor"], float)
        found["router_scale"] = float(scale)
    keys.get("output_router_logits", False, bool)
    keys.get(AUX, 0.0, float)
    return found


def _dense_layers(keys: Keys, family: Family, layers: int) -> list[int]:
    """Returns the numbers of the layers without experts."""
    names = family.experts
    assert names is not None
    if names.dense is None:
        return []
    if names.dense != LISTED:
        first = keys.get(names.dense, family.defaults[names.dense], int)
        return list(range(min(first, layers)))
    listed = keys.get(LISTED, [], list, null=[])
    if any(type(layer) is not int for layer in listed):
        raise keys.error(LISTED, listed, "it must be a list of whole numbers")
    step = keys.get(STEP, 1, int)
    if step < 1:
        raise keys.error(STEP, step, "it must be at least 1")
    dense = {*listed}
    return [layer for layer in range(layers) if layer in dense or (layer + 1) % step]


def written_experts(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys of config.json for a model's experts."""
    names = family.experts
    assert names is not None
    keys: dict[str, Any] = {
        names.count: model.num_experts,
        CHOSEN: model.experts_per_token,
        names.width: model.expert_size,
        "output_router_logits": False,
    }
    if names.joined:
        keys[LIMIT] = model.swiglu_limit
    if names.normalizes is None:
        keys[NORMALIZES] = model.router_normalize
    if names.shared is not None:
        shared = model.shared_expert_size
        keys[names.shared_width] = (
            shared // model.expert_size if names.shared_in_experts else shared
        )
    if names.dense == LISTED:
        keys |= {LISTED: sorted(model.dense_layers), STEP: 1}
    elif names.dense is not None:
        keys[names.dense] = len(model.dense_layers)
    if names.grouped:
        keys |= {"n_group": model.router_groups, "topk_group": model.router_top_groups}
        keys["routed_scaling_factor"] = model.router_scale
    if MTP in family.aliases.values():  # an export never has layers of multi-token prediction
        keys[MTP] = 0
    if "router_jitter_noise" in family.fixed:
        keys["router_jitter_noise"] = 0.0
    return keys


def wanted_experts(
    model: ModelConfig, names: ExpertNames
) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns (key, the model's value, allowed values) for the keys that the family restricts."""
    dense, shared = sorted(model.dense_layers), model.shared_expert_size
    biased = names.choice_bias is not None
    known: list[tuple[str, tuple[Any, ...]]] = [
        ("router_score", (names.score,)),
        ("router_bias", (biased,)),
        ("router_logit_bias", (names.joined,)),
        ("expert_bias", (names.joined,)),
        ("shared_expert_gate", (names.gated,)),
    ]
    if names.normalizes is not None:
        known.append(("router_normalize", (names.normalizes,)))
    if not names.grouped:
        known += [("router_scale", (1.0,)), ("router_groups", (1,))]
    wanted = [(key, getattr(model, key), values) for key, values in known]
    if names.dense is None:
        wanted.append(("dense_layers", dense, ([],)))
    elif names.dense != LISTED:
        wanted.append(("dense_layers", dense, (list(range(len(dense))),)))
    if names.joined and model.swiglu_limit is None:
        wanted.append((LIMIT, None, (7.0,)))
    if names.shared is None:
        wanted.append(("shared_expert_size", shared, (0,)))
    elif names.shared_in_experts:
        whole = max(1, shared // model.expert_size) * model.expert_size
        wanted.append(("shared_expert_size", shared, (whole,)))
    elif not shared:
        wanted.append(("shared_expert_size", shared, (model.expert_size,)))
    return wanted


def mtp_layers(config: Mapping[str, Any], family: Family) -> int:
    """Returns how many layers of multi-token prediction may follow the model's own layers."""
    known = MTP in family.aliases.values()
    return Keys(config, aliases=family.aliases).get(MTP, 0, int) if known else 0


def notices_of(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Returns a sentence for each feature of this config.json that an import leaves out."""
    found = []
    if family.experts is None:
        return ()
    if (aux := Keys(config).get(AUX, 0.0, float)) > 0:
        found.append(
            f"config.json has {AUX}={aux:g}: this auxiliary loss is left out, because transformers "
            "computes it over a micro-batch and all layers, so it would depend on the layout; "
            "moe.aux_loss=… adds such a loss for each sequence"
        )
    if (later := mtp_layers(config, family)) > 0:
        found.append(
            f"config.json has {MTP}={later}: layers of multi-token prediction are left out, as "
            "in transformers"
        )
    return tuple(found)
