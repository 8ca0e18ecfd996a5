"""Tensor and sequence parallelism: the layers that split a transformer block over one group."""
