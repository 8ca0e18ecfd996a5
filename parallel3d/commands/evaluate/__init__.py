"""Implements `parallel3d eval`, which scores rows of tasks with the model of a run."""
