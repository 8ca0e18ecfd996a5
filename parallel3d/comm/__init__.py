"""Groups of ranks and what they do together: collectives, shared memory, the log of both."""
