"""Tensor-parallel linear layers, embedding and loss, with sequence parallelism."""
