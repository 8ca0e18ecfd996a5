"""Executes pipeline schedules, with point-to-point messages between stages."""
