"""Sharding specs of parameters, their initial values, gradients and gathering."""
