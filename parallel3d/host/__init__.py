"""Describes this machine: its devices, environment, memory, CPUs and processes."""
