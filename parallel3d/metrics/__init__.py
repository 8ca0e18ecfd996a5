"""Metrics of a run: `metrics.jsonl`, progress, W&B, `summary.json`; and what MFU is made of.

Rank 0 alone makes a `recorder.Recorder`; nothing here communicates. Importing the package
imports neither torch nor wandb: take what is needed from its modules.
"""
