"""Implements `parallel3d generate`."""
