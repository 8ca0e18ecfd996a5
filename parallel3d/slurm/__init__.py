"""Runs a training job under Slurm: its nodes, its starts, and the decision after each end."""
