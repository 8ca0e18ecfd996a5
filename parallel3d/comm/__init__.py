"""Groups of ranks and what they do together: collectives, their clock, log and store."""
