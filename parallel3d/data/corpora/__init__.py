"""What a run reads: texts, pairs of tokens, blends of them, each split in two."""
