"""Times a mixture of experts next to transformers' and next to a dense MLP, in turns on one
process.

    python -m benchmarks.speed.experts

The model has the shape of OLMoE: 4 layers, hidden size 512, 16 experts of width 256, 4 for a token,
sequences of 512 tokens. A step is forward, backward, clipping and AdamW in fp32. Both sides begin
with the same weights, and their losses are compared. transformers runs with each of its
implementations of experts. The second table compares one layer of experts with an MLP of equal
active FLOPs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.mixtures import of_transformers, take, transformers_mixture
from parallel3d.comm.group import SINGLE
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from parallel3d.experts.choice import Choice
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layers import BuildContext
from parallel3d.models.mlp import MLP
from parallel3d.parameters.initializer import Initializer
from parallel3d.run_config import Config
from parallel3d.trainer import Trainer

SEQUENCES, LENGTH, VOCABULARY = 2, 512, 2048
HIDDEN, LAYERS, HEADS = 512, 4, 8
EXPERTS, CHOSEN, WIDTH = 16, 4, 256
WAYS = ("eager", "grouped_mm")  # batched_mm copies the weights for each token
RATE, CLIP = 1e-4, 1.0


def model() -> ModelConfig:
    """Returns the configuration of the model."""
    return ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=CHOSEN * WIDTH,
        seq_length=LENGTH,
        vocab_size=VOCABULARY,
        norm="rmsnorm",
        position_embedding="rope",
        qk_norm=True,
        qk_norm_width="full",
        activation="swiglu",
        bias=False,
        tie_embeddings=False,
        num_experts=EXPERTS,
        experts_per_token=CHOSEN,
        expert_ffn_size=WIDTH,
        router_normalize=False,
    )


class RandomTokens:
    """A source of random tokens, the same in every step."""

    seq_length = LENGTH
    masks = False

    def sample(self, i: int) -> Sample:
        rng = np.random.default_rng(i % SEQUENCES)
        tokens = rng.integers(VOCABULARY, size=LENGTH + 1)
        return Sample(tokens.astype(np.int64), np.ones(LENGTH, dtype=bool))


def our_step() -> tuple[Callable[[], float], dict[str, Tensor]]:
    """Returns a function that runs a training step and returns its loss, and the initial
    weights."""
    config = Config(
        model=model(), device="cpu", micro_batch_size=SEQUENCES, global_batch_size=SEQUENCES
    )
    optim = config.optim
    optim.lr, optim.lr_decay_style, optim.clip_grad, optim.weight_decay = RATE, "constant", CLIP, 0
    device = torch.device("cpu")
    trainer = Trainer(config, ProcessGroups.single(), device, train_source=RandomTokens())
    weights = {name: w.clone() for name, w in trainer.full_parameters().items()}
    return lambda: trainer.train_step().loss or 0.0, weights


def their_step(way: str, weights: Mapping[str, Tensor]) -> Callable[[], float]:
    """Returns a function that runs the same step with transformers' model and our weights."""
    theirs = transformers_mixture(model(), way, torch.device("cpu"))
    take(theirs, of_transformers(model(), weights))
    optimizer = torch.optim.AdamW(theirs.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0)
    source = RandomTokens()
    tokens = torch.stack([torch.from_numpy(source.sample(i).tokens) for i in range(SEQUENCES)])
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    def step() -> float:
        optimizer.zero_grad()
        logits = theirs(inputs, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def layers() -> dict[str, Callable[[], float]]:
    """Returns forward and backward of a layer of experts, and of an MLP of equal active FLOPs."""
    context = BuildContext(Initializer(0, torch.float32, torch.device("cpu")), SINGLE, sp=False)
    experts = MixtureOfExperts(0, model(), context)
    dense = MLP("layers.0.mlp", CHOSEN * WIDTH, model(), context, bias=False)
    x = torch.randn(SEQUENCES, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0))

    def run(layer: nn.Module, *more: Any) -> float:
        for parameter in layer.parameters():
            parameter.grad = None
        out = layer(x.clone().requires_grad_(), nn.Identity(), *more)
        out.backward(torch.ones_like(out))
        return 0.0

    return {"experts": lambda: run(experts, Choice(), None), "dense MLP": lambda: run(dense)}


def in_turns(calls: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Calls each function in turn, `rounds` times after two warm-ups; returns their seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        results = []
        for name, call in calls.items():
            begin = time.perf_counter()
            results.append(call())
            if number >= 2:
                seconds[name].append(time.perf_counter() - begin)
        if number == 0 and max(results) - min(results) > 1e-4:
            raise SystemExit(f"the losses of the first step differ: {results}")
    return seconds


def show(title: str, seconds: Mapping[str, list[float]]) -> None:
    """Prints each median, and the median over the rounds of its ratio to the first."""
    print(f"{title}\n\n| | ms | ratio, median of {len(next(iter(seconds.values())))} (min–max) |")
    print("|---|---|---|")
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        ratios = [b / a for a, b in zip(first, times, strict=True)]
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
        median = statistics.median(ratios)
        print(f"| {name} | {1e3 * statistics.median(times):.0f} | {median:.2f} ({spread}) |")
    print()


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ours, weights = our_step()
    steps = {"parallel3d": ours}
    steps |= {f"transformers, {way}": their_step(way, weights) for way in WAYS}
    show("A training step", in_turns(steps, rounds))
    show("Forward and backward of a layer", in_turns(layers(), 3 * rounds))


if __name__ == "__main__":
    main()
