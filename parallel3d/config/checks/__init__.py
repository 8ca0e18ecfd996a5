"""Cross-checks of the keys of a configuration."""
