"""The device that tensors are on: streams, fused functions, number formats."""
