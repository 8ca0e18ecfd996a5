"""Runs the training loop, with hooks around its steps."""
