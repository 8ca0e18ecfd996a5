"""`parallel3d eval`: rows of tasks, scored by the model of a run."""
