"""Trains the transformer with a hook that logs the mean square of each layer's output.

    python examples/probe_hook.py
    python examples/probe_hook.py tp=2 pp=2                # starts four ranks
    torchrun --nproc-per-node 4 examples/probe_hook.py tp=2

The figures do not depend on the layout, and a resumed run goes on with the hook's own averages.
"""

import functools
import re

import torch

import parallel3d as p3d


class LayerOutputs(p3d.Hook):
    """Logs a layer's mean square in each step, and its average over the steps."""

    def __init__(self, decay=0.9):
        self.decay = decay
        self.averages = {}  # by layer; a rank has those of its own pipeline stages
        self.squares = {}

    def before_run(self):
        for stage in self.run.stages:
            for name, module in stage.named_modules():
                if re.fullmatch(r"layers\.\d+", name):
                    module.register_forward_hook(functools.partial(self.look, name))

    def before_step(self, step):
        self.squares.clear()

    def look(self, name, module, inputs, output):
        # Stays on the device, so the host does not wait for it.
        self.squares.setdefault(name, []).append(output.detach().square().mean())

    def after_step(self, result):
        for name, squares in self.squares.items():
            value = torch.stack(squares).mean()  # over the micro-batches
            self.run.log(f"layers/{name.partition('.')[2]}", value)  # the mean over the ranks

    def after_evaluation(self, step, row):
        if row["eval_loss"] is not None:
            before = self.averages.get("eval_loss", row["eval_loss"])
            average = self.decay * before + (1 - self.decay) * row["eval_loss"]
            self.averages["eval_loss"] = average
            self.run.log("smooth/eval_loss", average)

    def state_dict(self):
        return self.averages

    def load_state_dict(self, state):
        self.averages = dict(state)


if __name__ == "__main__":
    p3d.fit(["model=llama_tiny", "train.steps=100"], hooks=[LayerOutputs()])
