"""Runs the command line as a user types it, in its own processes."""
