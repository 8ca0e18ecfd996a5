"""Tests on real gloo ranks: `pool.run(world_size, function, *args)`."""
