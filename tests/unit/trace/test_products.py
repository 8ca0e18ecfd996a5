"""Tests that the FLOPs that follow from declarations are those of the products that layers run, and
one trace by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.ready import run_code

pytestmark = pytest.mark.slow

DENSE = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 64}
GATED = {"num_query_groups": 2, "norm": "rmsnorm", "activation": "swiglu", "bias": False}
EXPERTS = DENSE | GATED | {"num_experts": 8, "expert_ffn_size": 16, "experts_per_token": 3}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": DENSE,
    "rope": DENSE | GATED | {"position_embedding": "rope"},
    "attention gate": DENSE | GATED | {"attention_gate": True},
    "score cap": DENSE | GATED | {"attention_logit_cap": 5.0},
    "attention sinks": DENSE | GATED | {"attention_sinks": True},
    "after": DENSE | GATED | {"norm_position": "after", "qk_norm": True},
    "sliding": DENSE | GATED | {"layer_types": ["sliding"], "sliding_window": 8},
    "experts": EXPERTS,
    "shared": EXPERTS | {"shared_expert_size": 24},
    "gate": EXPERTS | {"shared_expert_size": 24, "shared_expert_gate": True},
}
WORDS = ("norm,activation", "attention", "mlp", "full")
SCRIPT = """
import json, sys
from dataclasses import replace
from parallel3d.models.declared import LayerKind
from parallel3d.models.flops import flops_of
from parallel3d.models.keys import ModelConfig
from parallel3d.models.repeats import Repeats
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config
from parallel3d.trace.recorder import record
from parallel3d.trace.wanted import WantedTrace

models, words = json.loads(sys.argv[1])
cases, wanted = [], []
for name, keys in models.items():
    for word in words:
        config = Config(model=ModelConfig(**keys, num_layers=2), recompute=word, device="cuda")
        config.precision.name, config.micro_batch_size = "bf16", 1
        cases.append((name, word, config.model))
        wanted.append(WantedTrace.of(blueprint_of(config), 1, recomputed=True))
for (name, word, model), trace in zip(cases, record(wanted), strict=True):
    passes, kind = trace.at(1), LayerKind.of(model, 1)
    traced, declared, capped = [], [], model.attention_logit_cap is not None
    for each, repeats in ((passes.forward, None), (passes.repeated, Repeats.of(word))):
        length, found = model.seq_length, flops_of(model, kind, repeats)
        traced += [each.product_flops, each.flops]
        products, total = length * found.products, length * found.total(length, length / 2)
        if capped:  # no kernel does so: attention is products of one block of queries with all keys
            products = total = length * found.total(length, length)
        declared += [products, total]
    whole = flops_of(model, kind)
    backward = 2 * length * whole.products
    backward += capped * 2.5 * length**2 * whole.attention  # 5 products, and 2 in the forward
    print(json.dumps([name, word, traced + [passes.backward.product_flops], declared + [backward]]))

config = Config(model=ModelConfig(**models["rope"], num_layers=2), device="cuda")
config.tp, config.sp, config.pp, config.micro_batch_size = 2, True, 2, 1
config.precision.name, config.schedule.name = "bf16", "zb_h1"
(trace,) = record([WantedTrace.of(blueprint_of(config), 1, recomputed=False)])
passes = trace.at(1)
forward, backward = passes.forward, passes.backward
print(json.dumps(["split", "", {
    "live": [forward.live, -passes.weights.live],
    "left": [sum(passes.kept), sum(passes.deferred)],
    "shared": passes.shared,
    "sent": [
        sorted([e.group, e.op, e.count, e.nbytes] for e in p.sent) for p in (forward, backward)
    ],
    "products": [p.product_flops for p in (forward, passes.inputs, passes.weights)],
    "attention": [sum(a.flops for a in p.attentions) for p in (forward, backward)],
}, []]))

config.tp, config.sp, config.pp, config.schedule.name = 1, False, 1, "1f1b"
config.dp, config.zero, config.micro_batch_size = 2, 3, 2
wanted = WantedTrace.of(blueprint_of(config), 1, recomputed=False)
measured = {}
(first,), (second,) = (record([replace(wanted, sizes=(n,))], measured) for n in (2, 6))
(both,) = record([replace(wanted, sizes=(2, 6))])
print(json.dumps(["sharded", "", [
    [trace.at(n).backward.launches for trace, n in ((first, 2), (second, 6), (both, 4))],
    second.several == both.several,
], []]))

small = {"num_layers": 4}
large = {"num_layers": 5, "vocab_size": 99, "tie_embeddings": True, "logit_cap": 9.0}
for name in ("sliding", "experts"):
    wanted = []
    for size in (small, large):
        config = Config(model=ModelConfig(**models[name] | size), device="cuda")
        config.micro_batch_size = 1
        wanted.append(WantedTrace.of(blueprint_of(config), 3, recomputed=False))
    alone = [record([each])[0] for each in wanted]
    print(json.dumps([name, "sizes", [wanted[0].key == wanted[1].key, alone[0] == alone[1]], []]))
"""


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    done = run_code(SCRIPT, json.dumps([MODELS, WORDS]))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(name, word): (traced, declared) for name, word, traced, declared in rows}


def test_a_layer_of_two_tensor_parallel_ranks_whose_backward_is_split(found) -> None:
    split, _ = found["split", ""]
    assert split["live"] == split["left"] and min(split["live"]) > 0
    assert split["shared"]  # rows of the rotary tables
    whole = 32 * 64 * 2  # tokens · hidden · bytes
    gathers, scatters = (["tp", op, 2, whole] for op in ("all_gather", "reduce_scatter"))
    assert split["sent"] == [[gathers, scatters], [["tp", "all_gather", 4, whole], scatters]]
    assert len({*split["products"]}) == 1
    forward, backward = split["attention"]
    assert backward == 2.5 * forward


@pytest.mark.parametrize("name", ["sliding", "experts"])
def test_models_that_differ_outside_their_layers_have_the_same_traces(name: str, found) -> None:
    assert found[name, "sizes"][0] == [True, True]


def test_with_fsdp2_a_recording_does_not_add_to_the_gradients_of_the_one_before(found) -> None:
    launches, same_line = found["sharded", ""][0]
    assert len({*launches}) == 1 and same_line


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("word", WORDS)
def test_the_products_of_a_layer_have_the_flops_of_its_declaration(
    name: str, word: str, found
) -> None:
    traced, declared = found[name, word]
    assert traced == declared
