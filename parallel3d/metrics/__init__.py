"""What a run tells of itself: metrics.jsonl, progress, W&B, MFU, breakdown.

Rank 0 alone makes a `recorder.Recorder`; nothing here communicates. Importing the package
imports neither torch nor wandb: take what is needed from its modules.
"""
