"""Inputs of each door (a place where data enters) with their right answers: one module per door,
with a function `inputs`."""
