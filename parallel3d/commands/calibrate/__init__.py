"""`parallel3d calibrate`: this machine measured into a cluster file."""
