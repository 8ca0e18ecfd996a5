"""Keys of mixtures of experts: the model, load balancing, and how tokens reach the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallel3d.config.conflicts import Conflict, Matches, NoneOf, OneOf
from parallel3d.config.values import (
    AUTO,
    FREE,
    LAYOUT,
    REFUSED,
    key,
)


@dataclass
class ExpertKeys:
    """The experts of a model, and the router that chooses among them for each token."""

    RESUME: ClassVar[str] = REFUSED
    num_experts: int = key(
        0,
        "experts of a layer, of which each token uses experts_per_token; 0: ordinary MLPs",
        minimum=0,
        maximum=4096,
        tried=(8,),
    )
    experts_per_token: int = key(2, "experts that each token uses", minimum=1)
    expert_ffn_size: int | None = key(None, "width of an expert; null: ffn_hidden_size", minimum=1)
    expert_bias: bool = key(
        False, "biases in the linear layers of experts, but not of the shared one (gpt-oss)"
    )
    shared_expert_size: int = key(
        0, "width of the shared expert, which every token uses; 0: none", minimum=0
    )
    shared_expert_gate: bool = key(
        False, "the shared expert's output is multiplied by a sigmoid of the token (Qwen2-MoE)"
    )
    router_score: str = key(
        "softmax",
        "the router's scores: softmax over all experts, or sigmoid of each (DeepSeek-V3)",
        choices=("softmax", "sigmoid"),
    )
    router_normalize: bool = key(True, "the weights of a token's experts are divided by their sum")
    router_scale: float = key(1.0, "factor of the weights of a token's experts", above=0)
    router_logit_bias: bool = key(
        False, "a trained bias on each expert's logit, before the score (gpt-oss)"
    )
    router_bias: bool = key(
        False,
        "a bias on each expert's score that only affects the choice, and is updated once a step "
        "so that experts get equally many tokens (DeepSeek-V3 report, §2.1.2)",
    )
    router_groups: int = key(
        1,
        "groups of experts, of which a token uses router_top_groups; a group's score is its best "
        "expert's, and with sigmoid the sum of its two best",
        minimum=1,
    )
    router_top_groups: int = key(1, "groups of experts that each token may use", minimum=1)
    dense_layers: list[int] = key(
        [], "layers with an ordinary MLP in place of experts, as [0,1,2], counted from 0"
    )

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has experts in place of an MLP."""
        return self.num_experts > 0 and layer not in self.dense_layers


@dataclass
class ExpertLayoutKeys:
    """Expert parallelism, which shares the ranks of a pipeline stage with tp, cp and dp."""

    ep: int = key(
        1,
        "expert-parallel size: the ranks of a pipeline stage (tp · cp · dp) are divided into "
        "groups of this size, each of which holds every expert once; it does not multiply the "
        "world size",
        minimum=1,
        resume=LAYOUT,
        tried=(2,),
    )


@dataclass
class ExpertsConfig:
    """Balance of a mixture of experts, and how tokens reach the experts."""

    aux_loss: float = key(
        0.0,
        "coefficient of the auxiliary loss of each sequence (DeepSeek-V3 report, eq. 17)",
        minimum=0,
        tried=(0.01,),
    )
    z_loss: float = key(
        0.0,
        "coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE, Zoph et al. "
        "2022)",
        minimum=0,
        tried=(0.001,),
    )
    bias_update_rate: float = key(
        0.001,
        "change of the router's bias in a step, with model.router_bias; 0, unless it is given, in "
        "a run that begins with finished weights (init_from, checkpoint import)",
        minimum=0,
    )
    dispatch: str = key(
        AUTO,
        "how tokens reach the experts of other ranks: gather gives each rank the tokens of all "
        "ranks of its group, all_to_all sends a token once to each rank with an expert of it; "
        "auto takes the one that sends less",
        choices=(AUTO, "gather", "all_to_all"),
        resume=FREE,
        tried=("gather", "all_to_all"),
    )
    overlap: bool = key(
        False,
        "run the forward of a micro-batch in turns with the backward of the previous one, so that "
        "tokens of each travel while the other computes (DualPipe); holds one micro-batch more",
        resume=FREE,
        tried=(True,),
    )
    routing: str = key(
        "model",
        "who chooses the experts of a token in training: the model's router, or balanced, which "
        "gives all experts equally many tokens of each sequence, for measurements of speed",
        choices=("model", "balanced"),
        tried=("balanced",),
    )


def _is_mixture(num_experts: int) -> bool:
    return num_experts > 0


def _shards_gradients(zero: int) -> bool:
    return zero > 1


EXPERTS = Matches(_is_mixture, 8)

CONFLICTS = (
    Conflict(
        {"model.num_experts": EXPERTS, "tp": NoneOf(1), "sp": OneOf(False)},
        "{model.num_experts} needs each token on one rank, but {sp} repeats the tokens on {tp} "
        "ranks",
        (("sp", True), ("tp", 1)),
    ),
    Conflict(
        {"model.num_experts": EXPERTS, "model.bias": OneOf(True)},
        "{model.num_experts}: experts have biases with model.expert_bias, but {model.bias}",
        (("model.bias", False),),
    ),
    Conflict(
        {"model.num_experts": OneOf(0), "ep": NoneOf(1)},
        "{ep} divides experts over ranks, but {model.num_experts}",
        (("ep", 1),),
    ),
    *(
        Conflict(
            {"moe.overlap": OneOf(True), other: NoneOf(on)},
            "{moe.overlap} runs a forward and a backward of one rank in turns, which does not work "
            f"with {{{other}}}",
            ((other, on), ("moe.overlap", False)),
        )
        for other, on in (("pp", 1), ("schedule.name", "1f1b"), ("offload_layers", None))
    ),
    Conflict(
        {"moe.overlap": OneOf(True), "model.tie_embeddings": OneOf(True)},
        "{moe.overlap} would add two gradients to one table at the same time, as "
        "{model.tie_embeddings} makes embedding and head share it",
        (("moe.overlap", False), ("model.tie_embeddings", False)),
    ),
    Conflict(
        {"moe.overlap": OneOf(True), "schedule.timeline": OneOf(True)},
        "{moe.overlap} interleaves the actions that {schedule.timeline} times one by one",
        (("schedule.timeline", False), ("moe.overlap", False)),
    ),
    Conflict(
        {"moe.overlap": OneOf(True), "ep": OneOf(1)},
        "{moe.overlap} hides the time in which tokens travel to other ranks, but {ep} has "
        "no such time",
        (("moe.overlap", False),),
    ),
    Conflict(
        {"moe.overlap": OneOf(True), "zero": Matches(_shards_gradients, 2)},
        "{moe.overlap} runs a forward and a backward at the same time, but FSDP2, which {zero} "
        "uses, gathers and frees parameters for only one of them",
        (("zero", 1), ("moe.overlap", False)),
    ),
    *(
        Conflict(
            {"model.num_experts": EXPERTS, other: NoneOf(off)},
            f"{{model.num_experts}} does not work with {{{other}}} yet",
            ((other, off),),
        )
        for other, off in (
            ("mlp_chunk_tokens", None),
            ("ddp.hierarchical", False),
            ("ddp.shard_size", None),
        )
    ),
)
