"""Collectives as textbooks draw them: rounds of messages, from which all else follows."""
