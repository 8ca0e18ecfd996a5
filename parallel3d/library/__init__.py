"""Provides, to scripts, groups, pipelines of any modules, gradient norms and checkpoints."""
