"""This machine: its devices, environment, memory, CPUs and processes."""
