"""Implements `parallel3d bench` and the preflight check, which find slow ranks and wires."""
