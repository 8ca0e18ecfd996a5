"""parallel3d: transformer training with tensor, pipeline and data parallelism."""

__version__ = "0.1.0"
