"""`parallel3d dryrun`: one rank of any layout, without its values, its peers or its GPU."""
