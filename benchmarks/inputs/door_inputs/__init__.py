"""Inputs of each door with their right answers: one module per door, with a function `inputs`."""
