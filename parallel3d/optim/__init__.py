"""Learning-rate schedules, the global gradient norm, and optimizers on flat buckets."""
