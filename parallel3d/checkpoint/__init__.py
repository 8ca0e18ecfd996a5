"""Saves and restores the state of a run in verified files that fit any layout."""
