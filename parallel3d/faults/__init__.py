"""Hangs found and explained, and steps that are not healthy."""
