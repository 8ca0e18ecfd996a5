"""Turns text into micro-batches: sources, tokenizers, token cache, samplers, loader.

Only `loader`, `documents` and `reading` import torch: the launcher checks data before torch loads.
"""
