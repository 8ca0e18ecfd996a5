"""What each rank holds, computes and sends: arithmetic on the configuration. No torch."""
