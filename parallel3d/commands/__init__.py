"""Contains the subcommands of `parallel3d`, each in its own file or folder."""
