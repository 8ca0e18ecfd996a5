"""Samples of whole documents that fit together, by a plan that is made once and lies in a file."""
