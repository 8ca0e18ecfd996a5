"""The command line as a user types it, in processes of its own."""
