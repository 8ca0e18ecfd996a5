"""Mixture of experts: routers, dispatch over expert-parallel ranks, experts and load balancing."""
