"""A run's ranks: how they meet, where they write, how they end."""
