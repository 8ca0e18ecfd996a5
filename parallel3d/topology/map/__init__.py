"""The report of `parallel3d topology`: a table, an SVG and JSON."""
