"""Text in, micro-batches out: sources, byte tokenizer, token cache, sampler, batches.

Only `batches`, `documents` and `agreement` import torch: the launcher must be able to refuse bad
data before torch is loaded.
"""
