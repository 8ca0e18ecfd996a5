"""Optimizers: AdamW and SGD on flat segments, Muon on whole matrices."""
