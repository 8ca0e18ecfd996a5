"""Implements `parallel3d dryrun`, which runs a rank without its peers, a GPU or tensor values."""
