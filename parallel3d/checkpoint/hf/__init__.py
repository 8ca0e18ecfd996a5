"""Reads and writes Hugging Face folders: their files, config.json and tensor names."""
