"""The transformer, written once, from the tensor-parallel layers."""
