"""The device of a rank: its streams, its kernels and its number formats."""
