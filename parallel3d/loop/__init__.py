"""The training loop of a run, and the hooks that run around its steps."""
