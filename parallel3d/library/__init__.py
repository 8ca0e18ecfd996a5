"""Provides scripts with groups, pipelines of any modules, gradient norms and checkpoints."""
