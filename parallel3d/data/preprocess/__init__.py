"""Tokenises text files into Megatron indexed datasets, in parallel and resumable."""

from __future__ import annotations

# File formats that are read, and their compressions.
LINES, PARQUET, TEXT = "jsonl", "parquet", "text"
KINDS = (LINES, PARQUET, TEXT)
ENDS = {".jsonl": LINES, ".ndjson": LINES, ".json": LINES, ".parquet": PARQUET}
PACKED = (".gz", ".zst")
