"""Rank mappings: searched, or given by the user."""
