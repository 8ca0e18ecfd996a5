"""What the loss in fp16 errs by, beside the loss in fp32, of the same fp16 logits.

    python -m benchmarks.half_loss

1,024 tokens of GPT-2's vocabulary; logits are normal with a standard deviation as at the start of a
training (0.6), and sharper ones, labels drawn from their softmax. Exact: fp64 of the same logits.
Gradients are for a loss scale of 65,536 over the 16,384 tokens of the preset's batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel3d.tensor_parallel.loss import ChunkLoss, Objective

TOKENS, VOCAB, FACTOR = 1024, 50257, 4.0


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    print("| std | mean loss | type | error of the mean | rms error of a token | of the gradient |")
    print("|---|---|---|---|---|---|")
    for std in (0.6, 2.0, 4.0):
        logits = torch.randn(TOKENS, VOCAB, generator=generator) * std
        labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
        logits = logits.half()
        exact = F.cross_entropy(logits.double(), labels, reduction="none")
        wanted = FACTOR * (logits.double().softmax(1) - F.one_hot(labels, VOCAB))
        away = F.one_hot(labels, VOCAB) == 0
        for name, half in (("fp32", False), ("fp16", True)):
            chunk = ChunkLoss(logits.clone(), labels, 0, Objective(VOCAB, half=half))
            losses = chunk.losses(chunk.statistics().unsqueeze(0)).double()
            gradient = chunk.gradient(torch.full((TOKENS,), FACTOR)).double()
            off = losses - exact
            # Away from the label: there the softmax is small, and the rounding counts.
            share = ((gradient - wanted) * away).norm() / (wanted * away).norm()
            print(
                f"| {std} | {exact.mean():.4f} | {name} | {off.mean():+.1e} | "
                f"{off.square().mean().sqrt():.1e} | {share:.1e} |"
            )


if __name__ == "__main__":
    main()
