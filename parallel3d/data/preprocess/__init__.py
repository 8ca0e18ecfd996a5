"""Tokenises text files into Megatron indexed datasets, in parallel and resumable."""
