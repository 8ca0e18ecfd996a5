"""Implements `parallel3d eval`."""
