"""Model statistics: what each rank holds, computes and sends, from the configuration. No torch."""
