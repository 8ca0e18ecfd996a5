"""Records the metrics of a run in metrics.jsonl, on the screen, in TensorBoard and in W&B.

Only rank 0 creates a `recorder.Recorder`, and nothing here communicates between ranks. Importing
the package imports neither torch nor wandb.
"""
