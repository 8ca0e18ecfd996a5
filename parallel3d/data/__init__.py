"""Turns text into micro-batches, by sources, tokenizers, a token cache, samplers and a loader.

Only `loader` imports torch, so that the launcher can check data before torch loads.
"""
