"""Saves and restores the state of a run in verified files that any parallel layout can read."""
