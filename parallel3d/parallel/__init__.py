"""Provides process groups, tensor-parallel layers, pipelines and DDP for any module."""
