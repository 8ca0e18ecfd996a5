"""What goes wrong while a run runs: hangs, and steps that are not healthy."""
