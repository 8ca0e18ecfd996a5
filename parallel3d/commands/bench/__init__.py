"""What `parallel3d bench` measures."""
