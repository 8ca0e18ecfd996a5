"""Data parallelism: gradient buckets and their reduction during the backward pass."""
