"""Kinds of files that hold documents, told by their names. Apart, as help texts need no more."""

LINES, PARQUET, TEXT = "jsonl", "parquet", "text"
KINDS = (LINES, PARQUET, TEXT)
ENDS = {".jsonl": LINES, ".ndjson": LINES, ".json": LINES, ".parquet": PARQUET}
PACKED = (".gz", ".zst")
