"""The map of a cluster and the report of `parallel3d topology`: text, SVG, JSON."""
