"""Plants known bugs of chat: samples no longer have the masks of transformers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import transformers

from parallel3d.data.chat import SPOKEN, TOKEN, ChatSamples, Conversation, Reader
from parallel3d.data.sampler import Sample, SampleSource
from tests.unit.data.test_chat import ROWS, data, samples

pytestmark = pytest.mark.more

SEQ, EOT = 200, 0
Learned = tuple[tuple[int, bool], ...]


def expected(folder: Path) -> Counter[Learned]:
    """Returns, for each conversation, its tokens, and whether each is learned, by transformers
    alone."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    made = [
        tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        for row in ROWS
    ]
    return Counter(
        tuple(zip(one["input_ids"], map(bool, one["assistant_masks"]), strict=True)) for one in made
    )


def found(source: SampleSource, count: int) -> Counter[Learned]:
    """Returns the tokens and masks of `count` samples, without padding that is not learned."""
    learned: Counter[Learned] = Counter()
    for number in range(count):
        sample = source.sample(number)
        labels = np.append(False, sample.loss_mask)
        edges = [*np.unique(sample.starts).tolist(), SEQ + 1]
        for begin, end in itertools.pairwise(edges):
            pairs = list(zip(sample.tokens[begin:end].tolist(), labels[begin:end], strict=True))
            while pairs and pairs[-1] == (EOT, False):
                pairs.pop()
            if pairs:
                learned[tuple((token, bool(label)) for token, label in pairs)] += 1
    return learned


def reading(change: Callable[[Conversation], np.ndarray]) -> Iterator[None]:
    """Reads rows with the spoken tokens as changed by `change`."""
    sound = Reader.read

    def read(self: Reader, row: object) -> Conversation:
        one = sound(self, row)
        return one._replace(spoken=change(one))

    with patch.object(Reader, "read", read):
        yield


def masking(change: Callable[[Sample, np.ndarray], np.ndarray]) -> Iterator[None]:
    """Replaces the masks of samples by the result of `change` for a marked sample and its spoken
    tokens."""

    def sample(self: ChatSamples, i: int) -> Sample:
        marked = self._marked.sample(i)
        mask = change(marked, (marked.tokens & SPOKEN) != 0)
        return Sample(marked.tokens & TOKEN, mask, marked.starts)

    with patch.object(ChatSamples, "sample", sample):
        yield


@contextmanager
def a_span_begins_a_token_late() -> Iterator[None]:
    """The first word of an answer is not learned."""
    yield from reading(lambda one: one.spoken & np.append(False, one.spoken[:-1]))


@contextmanager
def a_span_ends_a_token_late() -> Iterator[None]:
    """The text that the template adds after an answer is learned."""
    yield from reading(lambda one: one.spoken | np.append(False, one.spoken[:-1]))


@contextmanager
def the_end_of_a_turn_is_not_learned() -> Iterator[None]:
    """The end of a turn is not learned, so the model would never stop."""
    yield from reading(lambda one: one.spoken & np.append(one.spoken[1:], False))


@contextmanager
def the_user_is_learned() -> Iterator[None]:
    """All turns are learned."""
    yield from reading(lambda one: np.ones_like(one.spoken))


@contextmanager
def the_mask_is_that_of_the_inputs() -> Iterator[None]:
    """A position is learned if its own token is spoken, instead of the next one."""
    yield from masking(lambda marked, spoken: marked.loss_mask & spoken[:-1])


@contextmanager
def the_mask_is_moved_twice() -> Iterator[None]:
    """A position is learned if the token after the next one is spoken."""
    yield from masking(lambda marked, spoken: marked.loss_mask & np.append(spoken[2:], False))


@contextmanager
def padding_is_learned() -> Iterator[None]:
    """The padding of a sample counts as spoken."""
    yield from masking(lambda marked, spoken: spoken[1:] | ~marked.loss_mask)


PLANTED = [
    a_span_begins_a_token_late,
    a_span_ends_a_token_late,
    the_end_of_a_turn_is_not_learned,
    the_user_is_learned,
    the_mask_is_that_of_the_inputs,
    the_mask_is_moved_twice,
    padding_is_learned,
]


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize("planted", [nullcontext, *PLANTED])
def test_a_planted_bug_of_chat_is_caught(planted: Callable, packing: str, tmp_path: Path) -> None:
    """Tests that without a bug everything equals transformers."""
    given = data(tmp_path, ROWS, packing=packing, document_mask=packing == "best_fit")
    read: Counter[Learned] = Counter()
    with planted():
        for source in samples(given, SEQ)[:2]:
            read += found(source, source.windows)
    assert (read == expected(tmp_path / "tok")) is (planted is nullcontext)
