"""What a cluster is made of, and how it is found."""
