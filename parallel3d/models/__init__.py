"""The decoder-only transformer, built from tensor-parallel layers."""
