"""Implements `parallel3d calibrate`, which measures rates and writes a cluster file."""
