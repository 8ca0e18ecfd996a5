"""The command line: arguments in, exit code out; its help."""
