"""The subcommands, one file or folder each."""
