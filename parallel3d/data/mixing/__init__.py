"""Blends of data sets without a table: which set a sample comes from, and which of its samples."""
