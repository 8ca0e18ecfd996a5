"""Files elsewhere, read through a bounded cache of their blocks."""
