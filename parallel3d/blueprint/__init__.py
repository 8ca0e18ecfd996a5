"""Derives the parameters and the work of each rank from a checked configuration, without torch."""
