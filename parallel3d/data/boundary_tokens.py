"""Samples documents to learn which tokens begin them, and which tokens end documents and turns.

An indexed dataset made by another program names no tokenizer. The one that the user gives for it is
compared with sampled documents: with their first and last tokens, and with the tokens that it makes
from their text.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from parallel3d.config.fields import show
from parallel3d.data.indexed import IndexedCorpus
from parallel3d.data.tokenizer import FileTokenizer, Roles, Tokenizer, UnencodableText
from parallel3d.errors import UserError

PLACES = 4  # number of sampled places of an indexed dataset
RUN = 16  # number of sampled documents at each place
FEW = PLACES * RUN
HEAD = 96  # number of first tokens of a document that are compared
CUT = 8  # number of last tokens that are not compared, because they may belong to a cut word
LEAST = 16  # the least number of tokens to compare; fewer would prove nothing
LOOKED_AT = 1 << 20  # number of first tokens of conversations that are examined
USUAL = 0.01  # share of turns that must end in a token for it to count as an end


class BoundaryTokens(NamedTuple):
    """Roles of tokens, learned from sampled documents, and sentences to show to the user."""

    roles: Roles
    sentences: tuple[str, ...] = ()


def look_at_dataset(
    dataset: IndexedCorpus, tokenizer: Tokenizer, name: str | None
) -> BoundaryTokens:
    """Compares sampled documents of another program's dataset with `tokenizer`.

    Errors call the tokenizer `name`. Raises UserError if documents hold tokens that the tokenizer
    does not have, or if only some documents begin with the tokens that it puts before every text.
    """
    ends: Counter[int] = Counter()
    count = begun = inside = whole = same = 0
    bos, given = tokenizer.bos, f"data.tokenizer={show(name)}"
    for number, tokens in _documents(dataset):
        if int(tokens.max()) >= tokenizer.vocab_size or int(tokens.min()) < 0:
            odd = int(tokens.max() if int(tokens.min()) >= 0 else tokens.min())
            raise UserError(
                f"{dataset.named} has token {odd} in document {number:,}, but {given} has "
                f"{tokenizer.vocab_size:,} tokens: give the tokenizer that made this dataset"
            )
        count += 1
        ends[int(tokens[-1])] += 1
        inside += tokenizer.eot in tokens[1:-1]
        begun += bool(bos) and tokens[: len(bos)].tolist() == bos
        if isinstance(tokenizer, FileTokenizer):
            again = _gives_again(tokenizer, tokens[: len(tokens) - 1], len(bos))
            whole, same = whole + (again is not None), same + (again is True)
    sentences = []
    if begun and begun < count:
        assert isinstance(tokenizer, FileTokenizer)  # a byte tokenizer puts no tokens before a text
        raise UserError(
            f"{dataset.named}: {begun} of {count} sampled documents begin with "
            f"{tokenizer.spelled(bos)}, which {given} puts before every text: tokenize all "
            "documents in the same way, as parallel3d data tokenize does"
        )
    learned = tuple(
        token
        for token, times in ends.items()
        if times == count and token in _enders(tokenizer) and token != tokenizer.eot
    )
    if ends[tokenizer.eot] < count:
        sentences.append(_of_ends(dataset, tokenizer, ends, count, bool(learned)))
    if inside:
        eot = _spelled(tokenizer, tokenizer.eot)
        sentences.append(
            f"{dataset.named}: {inside} of {count} sampled documents contain the end-of-text token "
            f"{eot}: each is still one document, because the .idx defines the boundaries"
        )
    if whole and 2 * same < whole:
        sentences.append(
            f"{dataset.named}: {whole - same} of {whole} sampled documents differ from the tokens "
            f"that {given} makes from their text: check that it made this dataset"
        )
    return BoundaryTokens(Roles(tuple(bos) if begun else (), learned), tuple(sentences))


def _of_ends(
    dataset: IndexedCorpus, tokenizer: Tokenizer, ends: Counter[int], count: int, learned: bool
) -> str:
    eot = _spelled(tokenizer, tokenizer.eot)
    ended = f"{ends[tokenizer.eot]} of {count} sampled documents end in token {eot}"
    found = f"{dataset.named}: {ended}"
    token, times = ends.most_common(1)[0]
    if token != tokenizer.eot and 2 * times > count:
        found += f", {times} in token {_spelled(tokenizer, token)}"
    then = "" if learned else "; a model trained on this dataset will not learn to end a text"
    return f"{found}: the .idx defines the boundaries of documents{then}"


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.spelled([token])
    return str(token)


def _enders(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the tokens that may end a text or a turn: added tokens and the tokenizer's ends."""
    added = tokenizer.added.values() if isinstance(tokenizer, FileTokenizer) else ()
    return frozenset((*added, *tokenizer.ends))


def _documents(dataset: IndexedCorpus) -> list[tuple[int, np.ndarray]]:
    """Returns the number, first tokens and last token of each sampled non-empty document."""
    if dataset.documents <= FEW:
        firsts, run = [0], dataset.documents
    else:
        firsts, run = [k * (dataset.documents - RUN) // (PLACES - 1) for k in range(PLACES)], RUN
    found = []
    for first in firsts:
        begins = dataset.begins(first, first + run).tolist()
        for number, (begin, end) in enumerate(pairwise(begins), first):
            if end > begin:
                head = dataset.tokens[begin : min(end, begin + HEAD)]
                last = dataset.tokens[end - 1 : end]
                found.append((number, np.append(head[: end - 1 - begin], last)))
    return found


def _gives_again(tokenizer: FileTokenizer, tokens: np.ndarray, first: int) -> bool | None:
    """Returns whether encoding the text of `tokens` gives them again; None for too few tokens.

    `first` is the number of tokens that the tokenizer puts before every text.
    """
    special = set(tokenizer.special.values())
    here = tokens.tolist()[first:] if tokens[:first].tolist() == tokenizer.bos else tokens.tolist()
    here = [token for token in here if token not in special]
    if len(here) < LEAST:
        return None
    try:
        again = tokenizer.encode(tokenizer.decode(here).encode("utf-8", "replace")).tolist()
    except UnencodableText:
        return False
    kept = len(here) - CUT
    return bool(again[:kept] == here[:kept])


def look_at_turns(
    dataset: IndexedCorpus, tokenizer: FileTokenizer, spoken: int, token_of: int, named: str
) -> BoundaryTokens:
    """Finds how the first conversations begin, and which tokens end their learned turns.

    Args:
        spoken: the bit that marks a learned token.
        token_of: the bit mask that removes this mark.
        named: the conversations' name in sentences.
    """
    marked = dataset.tokens[: min(len(dataset), LOOKED_AT)]
    is_spoken = (marked & spoken) != 0
    after = np.append(is_spoken[1:], False)
    lasts = np.flatnonzero(is_spoken & ~after)
    tokens = marked & token_of
    if len(marked) < len(dataset) and is_spoken[-1]:
        lasts = lasts[:-1]  # this turn may continue after the tokens read
    enders = _enders(tokenizer)
    ends = Counter[int]()
    blank = _Blank(tokenizer)
    for last in lasts.tolist():
        while last and is_spoken[last - 1] and blank(int(tokens[last])):
            last -= 1
        ends[int(tokens[last])] += 1
    learned = tuple(
        sorted(t for t, n in ends.items() if t in enders and n >= USUAL * max(1, len(lasts)))
    )
    begins = dataset.begins(0, min(dataset.documents, FEW))[:-1]
    bos = tokenizer.bos
    heads = [(dataset.tokens[at : at + len(bos)] & token_of).tolist() for at in begins.tolist()]
    begin = tuple(bos) if bos and all(head == bos for head in heads) else ()
    sentences: tuple[str, ...] = ()
    if len(lasts) and not learned:
        sentences = (
            f"{named}: no turn that the template marks as learned ends in a special token: the "
            "model will not learn to end a turn",
        )
    return BoundaryTokens(Roles(begin, learned), sentences)


class _Blank:
    """Recognises whitespace tokens, which templates may write after the end of a turn."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = dict[int, bool]()

    def __call__(self, token: int) -> bool:
        if token not in self._known:
            text = self._tokenizer.decode([token])
            special = token in self._tokenizer.added.values() or token in self._tokenizer.ends
            self._known[token] = not special and not text.strip()
        return self._known[token]
