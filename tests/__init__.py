"""The tests: `unit` is pure, `distributed` runs real gloo ranks, `e2e` runs the command line."""
