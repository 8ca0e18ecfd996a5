"""Bytes and launches of a rank of parallel3d itself, from shapes: `dryrun` in closed form."""
