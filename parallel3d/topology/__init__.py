"""Clusters, rank mappings, and the price of a step's communication on them."""
