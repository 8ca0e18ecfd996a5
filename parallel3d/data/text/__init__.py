"""Text through tokenizers: their files, what a run or a corpus keeps of them, cached texts."""
