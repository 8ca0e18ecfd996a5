"""Steps priced by what was measured on a machine, its cores shared out among the ranks."""
