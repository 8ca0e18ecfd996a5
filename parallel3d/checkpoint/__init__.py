"""State in files that prove themselves and fit any layout."""
