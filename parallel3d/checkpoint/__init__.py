"""Parameters as logical full tensors, whatever layout holds them."""
