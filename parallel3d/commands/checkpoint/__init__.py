"""Implements `parallel3d checkpoint ls|verify|diff|export|import`."""
