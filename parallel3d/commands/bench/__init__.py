"""`parallel3d bench` and the preflight check: measure collectives and find slow wires."""
