"""The command line: subcommands, their arguments and exit codes, and help texts."""
