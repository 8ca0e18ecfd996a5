"""What `bench ddp` trains, measures and draws."""
