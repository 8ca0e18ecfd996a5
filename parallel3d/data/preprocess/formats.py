"""Names the file formats that preprocessing reads, and their compressions."""

from __future__ import annotations

LINES, PARQUET, TEXT = "jsonl", "parquet", "text"
KINDS = (LINES, PARQUET, TEXT)
ENDS = {".jsonl": LINES, ".ndjson": LINES, ".json": LINES, ".parquet": PARQUET}
PACKED = (".gz", ".zst")
