"""Turns text into micro-batches: sources, tokenizers, token cache, samplers and loader.

Only `loader` imports torch, so that the launcher can check data before torch loads.
"""
