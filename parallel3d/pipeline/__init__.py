"""Runs pipeline schedules: stages send to each other, one executor."""
