"""Learning rates, the global gradient norm, optimizers on flat buckets."""
