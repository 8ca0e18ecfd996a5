"""Measures time and memory of training with frozen parameters, next to training all of them.

    python -m benchmarks.speed.freezing

One process trains on the CPU, with different parameters frozen in each variant. Variants take
turns, and each figure is a median. States are the tensors that the trainer holds between steps:
parameters, gradients, masters and moments.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.dryrun.counting import Zeros
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.trainer import Trainer

TRAINS_ALL = "all trained"


def ways_of(layers: int) -> dict[str, list[str] | None]:
    """Returns the patterns of `optim.freeze` of each variant."""
    half = [f"layers.{layer}.*" for layer in range(layers // 2)]
    return {
        TRAINS_ALL: None,
        "all but the head frozen": ["embedding.*", "layers.*", "final_norm.*"],
        "embedding and half of the layers frozen": ["embedding.*", *half],
        "attention and MLPs frozen": ["*.attention.*", "*.mlp.*"],
    }


def trainer_of(options: argparse.Namespace, freeze: list[str] | None) -> Trainer:
    model = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=8,
        seq_length=options.tokens,
        vocab_size=options.vocabulary,
        norm="rmsnorm",
        position_embedding="rope",
        activation="swiglu",
        bias=False,
        tie_embeddings=False,
    )
    config = Config(device="cpu", global_batch_size=1, micro_batch_size=1, model=model)
    config.precision.name = options.precision
    config.optim.freeze = freeze
    config.optim.lr_decay_style = "constant"
    source = Zeros(model.seq_length)
    return Trainer(config, ProcessGroups.single(), torch.device("cpu"), train_source=source)


def bytes_of_states(trainer: Trainer) -> int:
    """Returns the bytes that a trainer holds between steps, each storage once."""
    segments = trainer.data_parallel.segments
    tensors = [p.detach() for p in trainer.parameters.values()]
    tensors += [t for s in segments for t in (s.grad, s.master)]
    tensors += [t for g in trainer.optimizer.groups for ts in g.state.values() for t in ts]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = ways_of(options.layers)
    trainers = {way: trainer_of(options, freeze) for way, freeze in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(options.steps + 1):
        for way, trainer in trainers.items():
            start = time.process_time()  # CPU seconds of this process, because others may be busy
            trainer.train_step()
            if step:  # the first one makes lazy allocations
                seconds[way].append(time.process_time() - start)
    whole = statistics.median(seconds[TRAINS_ALL])
    elements = sum(p.numel() for p in trainers[TRAINS_ALL].parameters.values())
    print("| | step, ms | of all trained | bytes of states a parameter |\n|---|--:|--:|--:|")
    for way, trainer in trainers.items():
        median = statistics.median(seconds[way])
        held = bytes_of_states(trainer) / elements
        print(f"| {way} | {1e3 * median:.0f} | {median / whole:.2f} | {held:.1f} |")


if __name__ == "__main__":
    main()
