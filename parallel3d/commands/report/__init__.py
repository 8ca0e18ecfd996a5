"""`parallel3d report`: a page of runs."""
