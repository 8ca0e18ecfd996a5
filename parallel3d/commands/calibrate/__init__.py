"""`parallel3d calibrate`: measures this machine into a cluster file."""
