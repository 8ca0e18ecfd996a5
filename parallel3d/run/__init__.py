"""Ranks of a run: rendezvous, run directory, failures, exit codes."""
