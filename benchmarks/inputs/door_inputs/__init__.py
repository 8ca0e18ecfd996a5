"""Inputs of each door with their right answers: a module a door, each with a function `inputs`."""
