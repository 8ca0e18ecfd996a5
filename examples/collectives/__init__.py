"""Collectives in textbook form (ring, tree, chain, doubling): lists of messages, priced and run."""
