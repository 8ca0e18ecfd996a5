"""Resolves once what each rank holds and does, from a checked configuration, without torch."""
