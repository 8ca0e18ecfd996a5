"""Declares the keys of the training and held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from parallel3d.config.values import (
    FREE,
    REFUSED,
    REPORTED,
    key,
)

OWN = "own"  # the kind of source of a script's samples


@dataclass
class DataConfig:
    """Source of tokens: Python's sources (`data=stdlib`), text, a corpus, a blend, a chat."""

    RESUME: ClassVar[str] = FREE
    name: str = key(
        "stdlib",
        "kind of source; own: the samples that a script gives fit(train=…)",
        choices=("stdlib", "text", "corpus", "blend", "chat", OWN),
    )
    path: str | None = key(
        None,
        "text, chat: file, folder or glob, several joined by commas; corpus: prefix of an "
        "indexed dataset (.bin and .idx)",
        holds=Path,
    )
    blend: Any = key(
        None,
        "blend: weights by prefix, such as {web:0.7,code:0.3}; the word tokens as a weight means "
        "the corpus's number of tokens",
        holds=dict[Path, float],
        resume=REPORTED,
    )
    blend_stages: Any = key(
        None,
        "blend: new weights from a number of tokens on, such as {1000000000:{web:0.5,math:0.5}}",
        holds=dict[float, dict[Path, float]],
        resume=REPORTED,
    )
    most_epochs: float | None = key(
        None,
        "blend: refuse a blend that would read a part more often than this; null: a part read more "
        "than 4 times is logged",
        above=0,
    )
    held_out_sets: int = key(
        32,
        "blend: number of parts, the heaviest first, that have a held-out loss of their own",
        minimum=0,
    )
    block_cache_gb: float = key(
        20.0,
        "limit in gigabytes of the cache folder for blocks of remote corpora (s3://…)",
        above=0,
    )
    packing: str = key(
        "concat",
        "how documents become samples: concat cuts windows out of the concatenated documents; "
        "best_fit joins whole documents that fit together, by a plan that is made once; padded "
        "puts each document in a sample of its own",
        choices=("concat", "best_fit", "padded"),
        resume=REFUSED,
    )
    cut_documents: bool = key(
        False,
        "best_fit, padded: cut documents longer than a sample; false: refuse them",
        resume=REFUSED,
    )
    skip_bad_rows: float = key(
        0.0,
        "chat: the largest share of rows that may be left out because they are not conversations, "
        "such as 0.01; 0: the first such row is an error",
        minimum=0,
        maximum=1,
        resume=REFUSED,
    )
    chat_date: str | None = key(
        None,
        "chat: the date, such as 2026-11-29, that templates show as today's (strftime_now); null: "
        "the day of the run's first start, which the run keeps",
        alike=True,
        resume=REPORTED,
        tried=("2026-11-29",),
    )
    tokenizer: str | None = key(
        None,
        "byte, a tokenizer.json, a folder with one, or a name on Hugging Face's hub; null: that of "
        "the run or the corpus, or byte if neither has one",
        holds=Path,
    )
    add_bos: bool = key(
        True,
        "data=text: begin documents with the tokens that the tokenizer puts before every text, "
        "such as Llama's <|begin_of_text|>; parallel3d data tokenize has this key too",
        resume=REFUSED,
    )
    valid: Any = key(
        None,
        "validation sets by name, such as {web:corpora/web,code:code.txt}: prefixes of indexed "
        "datasets, or text as in data.path; each has a loss of its own",
        holds=dict[str, Path],
        tried=({"web": "corpora/web"},),
    )
    valid_fraction: float | None = key(
        None,
        "share of the training text held out for evaluation; null: 0.05, or 0 with data.valid",
        minimum=0,
        maximum=0.5,
        resume=REFUSED,
    )
    eod_mask_loss: bool = key(
        False,
        "do not train on predicting the first token of the next document",
        resume=REFUSED,
    )
    document_mask: bool | None = key(
        None,
        "keep attention within documents, and count positions from the first token of each; null: "
        "true if a sample may hold several conversations of data=chat, else false",
        resume=REFUSED,
    )
    cache_dir: str | None = key(
        None,
        "folder of the token cache; null: the user's cache folder",
        holds=Path,
    )

    @property
    def held_out(self) -> float:
        """The share of the text that is not trained on; it is 1 for a validation set."""
        if self.valid_fraction is None:
            return 0.0 if self.valid else 0.05
        return self.valid_fraction

    @property
    def masks_documents(self) -> bool:
        """Whether attention stays within documents, even if `document_mask` is null."""
        if self.document_mask is None:
            return self.name == "chat" and self.packing != "padded"
        return self.document_mask

    @property
    def reads_bytes(self) -> bool:
        """Whether the keys alone imply byte tokens; otherwise a corpus may still have them."""
        return self.tokenizer == "byte" or (
            self.tokenizer is None and self.name in ("stdlib", "text")
        )
