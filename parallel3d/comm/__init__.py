"""Groups of ranks and what they do together: collectives, their clock and log."""
