"""Tests that equal calls without values run once, and count each time as they do the first time.

The simulated device is enabled once and for all in a process, so the calls have one of their own.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.ready import run_code

pytestmark = pytest.mark.nightly

SCRIPT = """
import gc, json
import torch
from parallel3d.dryrun.counting import kind_of_memory, part_of_step, phase_of_step
from parallel3d.models import delta_rule
from parallel3d.device.fused import fused
from parallel3d.private_names import storage_address
from parallel3d.simulated_device.machine import Observer
from parallel3d.trace.products import product_of
from parallel3d.trace.recorder import record
from parallel3d.trace.wanted import WantedTrace
from parallel3d.trace.world import machine_without_values
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config, check_config

gc.disable()  # garbage is freed between calls only
machine = machine_without_values()
record([])  # imports Dynamo, which would keep memory of a call
module = torch.get_device_module("simulated")
again = module.run_again

class Events(Observer):
    def __init__(self):
        self.seen, self.made = [], set()
    def kernel(self, kernel):
        product = kernel.call and product_of(kernel)
        facts = kernel.name, kernel.launches, kernel.nbytes, str(product)
        self.seen.append([*facts, part_of_step(), phase_of_step()])
    def allocating(self, block):
        block.label = kind_of_memory()
    def allocated(self, block):
        self.made.add(block)
        self.seen.append(["allocated", block.nbytes, block.label, phase_of_step()])
    def freed(self, block):
        if block in self.made:  # autograd's thread may hold a tensor until its next backward
            self.seen.append(["freed", block.nbytes, block.label])

def geometry(t):
    storage = t.data_.untyped_storage()
    return [*t.shape], [*t.stride()], str(t.dtype), t.storage_offset(), storage.nbytes()

def events_of(call):
    gc.collect()  # what an earlier call has left is freed before this one
    machine.collect()
    events = Events()
    machine.observers.append(events)
    try:
        out = call()
        machine.collect()
        seen = [geometry(t) for t in (out if type(out) is tuple else [out])]
        held = sum(machine.block_of(t.data_).nbytes for t in out if t.numel())
    finally:
        machine.observers.remove(events)
    while events.seen[-1][0] == "freed":  # autograd's thread frees its last tensors when it likes
        events.seen.pop()
    return [seen, held, events.seen]

def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="simulated")

def made_at(path, source):
    names = {"torch": torch}
    exec(compile(source, path, "exec"), names)
    return names["scores"]

# Its memory is that of the loss, whose file is a frame of the stack only within the call.
in_loss = made_at("/parallel3d/tensor_parallel/loss.py", "def scores(x): return (x @ x).exp() + 1")

@fused
def norm(x, times):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * times

def rule():
    half = {"dtype": torch.bfloat16}
    q, k = (empty(2, 2048, 16, 128, **half).requires_grad_() for _ in range(2))
    v = empty(2, 2048, 32, 128, **half).requires_grad_()
    g, beta = (empty(2, 2048, 32).requires_grad_() for _ in range(2))
    y = delta_rule.delta_output(q, k, v, g, beta)
    return (y.detach(), *torch.autograd.grad(y, (q, k, v, g, beta), torch.empty_like(y)))

CALLS = {
    "rule": rule,
    "frames": lambda: (module.run_again(in_loss, [empty(8, 8)]),),
    "fused": lambda: (norm(empty(4, 8), 2.0),),
}
found = {}
for name, call in CALLS.items():
    module.run_again = lambda function, given: function(*given)
    run = events_of(call)
    module.run_again = again
    found[name] = [run, events_of(call), events_of(call)]

runs = []
def counted(function):
    def call(*given):
        runs.append(1)
        return function(*given)
    return call

def evaluations(function, *calls):
    function, before = counted(function), len(runs)
    for given in calls:
        again(function, given)
    return len(runs) - before

x, y, kept, host = empty(4, 4), empty(4, 4), [], torch.ones(3)
side = module.Stream()
def on_a_side_stream(x):
    with module.stream(side):
        return x + 1
add = lambda x, y: x + y
found["evaluations"] = {
    "equal": evaluations(add, (x, y), (y, x), (empty(4, 4), empty(4, 4))),
    "of an empty tensor": evaluations(lambda x: x.new_zeros(0), (x,), (x,)),
    "in place": evaluations(lambda x: x.add_(1) * 2, (x,), (x,)),
    "another number": evaluations(lambda x, n: x * n, (x, 1), (x, 2), (x, 1.0), (x, 2)),
    "another shape": evaluations(add, (x, y), (empty(2, 2), empty(2, 2))),
    "other strides": evaluations(add, (x, y), (x.t(), y), (x.t(), y)),
    "the same tensor twice": evaluations(add, (x, y), (x, x), (y, y)),
    "waits": evaluations(lambda x: x * x.sum().item(), (x,), (x,)),
    "keeps memory": evaluations(lambda x: kept.append(x + 1) or x + 2, (x,), (x,)),
    "returns an argument": evaluations(lambda x: x.add_(1), (x,), (x,)),
    "reads the host": evaluations(lambda x, n: x + n[0].item(), (x, host), (x, host)),
    "two streams": evaluations(on_a_side_stream, (x,), (x,)),
}

# The layers of an MoE with a recurrence, in layouts that differ in their experts alone.
made = []
plain = delta_rule.RuleChunks.__init__
def counting(self, *given):
    made.append(1)
    plain(self, *given)
delta_rule.RuleChunks.__init__ = counting

def wanted(ep, sizes):
    sizes_of_rule = dict(delta_key_heads=2, delta_value_heads=4, delta_key_size=16)
    model = ModelConfig(
        hidden_size=64, num_layers=2, num_attention_heads=4, seq_length=256, vocab_size=512,
        norm="rmsnorm", position_embedding="rope", activation="swiglu", bias=False,
        layer_types=["gated_deltanet", "full"], **sizes_of_rule, delta_value_size=16,
        num_experts=8, expert_ffn_size=32, experts_per_token=2, ffn_hidden_size=64,
    )
    config = Config(model=model, device="cuda", dp=4, ep=ep, micro_batch_size=1)
    config.global_batch_size = 8
    config.precision.name = "bf16"
    return WantedTrace.of(blueprint_of(check_config(config, own_samples=True)), 0, False)

chunks, traces = [], []
for ep in (1, 2, 4):
    before = len(made)
    traces.append(record([wanted(ep, (1,))])[0].as_json())
    chunks.append(len(made) - before)
found["chunks of a trace"] = chunks
found["traces differ"] = traces[0] != traces[1]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = run_code(SCRIPT)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("name", ["rule", "frames", "fused"])
def test_observers_see_a_repeated_call_like_the_first(name: str, found: dict[str, Any]) -> None:
    run, first, second = found[name]
    assert first == run
    assert second == run
    assert any("logits" in event for event in run[2]) == (name == "frames")


def test_calls_run_again_only_if_something_else_may_happen(found: dict[str, Any]) -> None:
    assert found["evaluations"] == {
        "equal": 1,
        "of an empty tensor": 1,
        "in place": 1,
        "another number": 3,
        "another shape": 2,
        "other strides": 2,
        "the same tensor twice": 2,
        "waits": 2,
        "keeps memory": 2,
        "returns an argument": 2,
        "reads the host": 2,
        "two streams": 2,
    }


def test_traces_of_further_expert_sizes_do_not_run_the_recurrence(found: dict[str, Any]) -> None:
    """A plan records a layer for each of them, and a recurrence has hundreds of operators."""
    first, *others = found["chunks of a trace"]
    assert first > 0 and found["traces differ"]
    assert others == [0, 0]
