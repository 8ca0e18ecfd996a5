"""A tokenizer trained on text: byte-level BPE, whose only special token parts documents.

Source: R. Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL 2016;
over bytes and GPT-2's words as in A. Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019, §2.2. Trained by Hugging Face's `tokenizers`, on all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from parallel3d.data.making.documents import Count, documents
from parallel3d.data.making.inputs import Input
from parallel3d.data.making.pieces import cut
from parallel3d.errors import UserError

END = "<|endoftext|>"


def train_tokenizer(
    inputs: Sequence[Input],
    vocab_size: int,
    text_key: str,
    progress: Callable[[int, Count], None],
) -> tuple[bytes, Count]:
    """The content of a tokenizer.json of at most `vocab_size` tokens, and what it was trained on.

    `progress` is told the bytes of the inputs that are read, and what came of them. The tokenizer
    itself puts END before a prompt, as in training every text but the first follows one. Raises
    UserError for inputs that cannot be read or hold no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    count = Count()
    inner.train_from_iterator(_texts(inputs, text_key, count, progress), trainer)
    if not count.size:
        raise UserError(f"input: none of its {count.rows:,} rows has a text")
    end = inner.token_to_id(END)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, end)]
    )
    return _with_newline(inner), count


def _with_newline(inner: Any) -> bytes:
    return f"{inner.to_str(pretty=True)}\n".encode()


def _texts(
    inputs: Sequence[Input],
    text_key: str,
    count: Count,
    progress: Callable[[int, Count], None],
) -> Iterator[str]:
    for each in cut(inputs):
        here = Count()
        for found in documents(inputs, each.piece, text_key, here):
            yield found.text
        count.add(here)
        progress(each.read, count)
