"""Data parallelism: gradient buckets and their reduction, ZeRO, FSDP2 and sums in bf16."""
