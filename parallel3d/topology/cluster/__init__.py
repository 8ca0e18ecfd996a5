"""Discovers the nodes, NVLink domains, rails and switches of a cluster."""
