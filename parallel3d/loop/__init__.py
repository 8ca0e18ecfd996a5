"""The training loop of a run, and what happens around its steps."""
