"""Mixture of experts: routers, dispatch over expert-parallel ranks, the experts, and balance."""
