"""Cross-checks of a configuration: what one key says must fit what another one says."""
