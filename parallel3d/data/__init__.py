"""Turns text into micro-batches: sources, tokenizers, token cache, samplers, loader.

Only `loader` and `documents` import torch: the launcher checks data before torch loads.
"""
