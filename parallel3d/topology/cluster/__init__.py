"""Clusters: nodes, NVLink domains, rails and switches, and their discovery."""
