"""Runs the ranks of a run: rendezvous, run directory, failures and exit codes."""
