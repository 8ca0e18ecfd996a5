"""The parts for a script of the user's own: its groups, and what wraps any module of PyTorch's."""
