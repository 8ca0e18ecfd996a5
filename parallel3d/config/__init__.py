"""Defines, reads and checks the configuration of a run, without importing torch."""
