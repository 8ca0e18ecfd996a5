"""Layers, embedding and loss split over one group, and their sequence."""
