"""Implements `parallel3d topology`, which maps ranks onto a cluster and prices their groups."""
