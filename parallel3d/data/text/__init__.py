"""Text and what makes tokens of it: tokenizers' files, sources of documents, tokenising."""
