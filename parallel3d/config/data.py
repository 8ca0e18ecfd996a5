"""Where tokens come from, and how samples are cut from them."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.sections import key


@dataclass
class DataConfig:
    """Where tokens come from: `data=stdlib` (Python's own sources) or `data=text data.path=…`."""

    name: str = key("stdlib", "kind of source", choices=("stdlib", "text"))
    path: str | None = key(
        None, "file, folder or glob; several joined by commas", megatron="--data-path"
    )
    tokenizer: str = key(
        "byte",
        "tokenizer",
        choices=("byte",),
        megatron="--tokenizer-type",
        differs="only the byte tokenizer exists here",
    )
    valid_fraction: float = key(
        0.05,
        "share of the tokens held out for evaluation",
        above=0,
        maximum=0.5,
        megatron="--split",
        differs="there the shares of train, validation and test, here the share held out",
    )
    eod_mask_loss: bool = key(
        False,
        "do not train on predicting the first token of the next document",
        megatron="--eod-mask-loss",
    )
    document_mask: bool = key(
        False,
        "attention within documents, and positions that count from each one's first token",
        megatron="--reset-attention-mask",
        differs="there positions restart by --reset-position-ids",
    )
    cache_dir: str | None = key(
        None,
        "folder of the token cache; null: the user's cache folder",
        megatron="--data-cache-path",
    )
