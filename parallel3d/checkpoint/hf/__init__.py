"""Hugging Face folders: their files, their config.json, their tensors' names."""
