"""Implements `parallel3d report`, which writes an HTML page about one or several runs."""
