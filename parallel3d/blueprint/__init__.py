"""What each rank holds and does, resolved once from a checked configuration, without torch."""
