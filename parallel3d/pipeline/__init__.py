"""Schedules as data, their checker, clock and pictures; one executor."""
