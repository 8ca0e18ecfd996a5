"""Implements `parallel3d checkpoint ls|verify|diff|average|branch|export|import`."""
