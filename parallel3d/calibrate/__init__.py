"""Implements `parallel3d calibrate`, which measures this machine and writes a cluster file."""
