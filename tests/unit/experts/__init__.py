"""Tests of the mixture of experts on one process."""
