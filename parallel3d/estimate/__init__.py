"""Predicts a training step without running it: shapes, FLOPs, traffic, memory and seconds."""
