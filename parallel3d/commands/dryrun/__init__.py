"""`parallel3d dryrun`: runs one rank of any layout without its peers, its GPU or tensor values."""
