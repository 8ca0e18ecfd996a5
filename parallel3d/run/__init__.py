"""A run and its ranks: who they are, how they meet, where they write, how they end."""
