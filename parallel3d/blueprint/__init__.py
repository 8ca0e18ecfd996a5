"""Resolves the parameters and the work of each rank once, from a checked configuration, without
torch."""
