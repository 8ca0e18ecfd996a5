"""Implements the command line: subcommands, arguments, exit codes and help texts."""
