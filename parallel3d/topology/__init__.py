"""Discovers clusters, maps ranks to GPUs, and prices a step's communication."""
