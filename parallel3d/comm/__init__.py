"""Process groups, collectives, StepTimer, operation log and the ranks' store."""
