"""The planner: seconds and bytes of a training step, from shapes alone or from measurements."""
