"""Provides process groups, pipelines, gradient norms and checkpoints for a user's own script."""
