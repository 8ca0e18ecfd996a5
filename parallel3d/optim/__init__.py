"""Learning-rate schedules, and optimizers on flat shards with the global gradient norm."""
