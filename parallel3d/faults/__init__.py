"""Hang reports and health checks."""
