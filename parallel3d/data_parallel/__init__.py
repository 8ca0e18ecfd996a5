"""Gradient buckets and their reduction, ZeRO, FSDP2, compressed sums."""
