"""`parallel3d generate`: text from a run's newest good checkpoint."""
