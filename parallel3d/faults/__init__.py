"""Detects hangs, bad gradients, loss spikes and replicas that drift apart, and reports them."""
