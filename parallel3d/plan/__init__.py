"""What a step takes, in seconds and bytes, from shapes alone: the planner's arithmetic."""
