"""Corpora and tokenizers made of text: inputs cut into pieces, tokens made by many processes."""
