"""Metrics of a run: metrics.jsonl, progress, W&B, MFU, breakdown of a step's time.

Only rank 0 creates a `recorder.Recorder`; nothing here communicates but `breakdown`. Importing the
package imports neither torch nor wandb.
"""
