"""Implements `parallel3d checkpoint ls|verify|diff|branch|export|import`."""
