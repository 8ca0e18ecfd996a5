"""One file or folder a subcommand: what it needs, composed."""
