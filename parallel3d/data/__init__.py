"""Turns text into micro-batches: sources, tokenizers, token cache, samplers, loader.

Only `loader` imports torch: the launcher checks data before torch loads.
"""
