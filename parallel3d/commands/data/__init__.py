"""`parallel3d data …`: text made a corpus, a tokenizer trained on it, a corpus shown and proved."""
