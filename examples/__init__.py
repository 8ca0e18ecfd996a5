"""Scripts that use parallel3d as a library, and programs for teaching."""
