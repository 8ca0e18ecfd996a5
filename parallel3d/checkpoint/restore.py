"""Reads a checkpoint on all ranks: complete, damaged, or unreadable for now.

Only checkpoints that are provably damaged may be set aside. What the system does not let a rank
read (a failing file system, a node without the mount, stale folder entries) proves nothing: reads
are retried for some seconds, then all ranks end alike and change nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from parallel3d.checkpoint.manifest import (
    DamagedCheckpoint,
    DataFacts,
    IncompleteCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    list_checkpoints,
    list_damaged,
    unreadable,
)
from parallel3d.config import identity
from parallel3d.config.schema import Config
from parallel3d.data.blend import Blend, history_until
from parallel3d.data.split import Corpus
from parallel3d.data.tokenizer import BYTE
from parallel3d.data.watched import Compared, compare, marks_of
from parallel3d.errors import TrainingFailure, UserError
from parallel3d.files import plain

PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # before each further try
_WHOLE, _DAMAGED, _INCOMPLETE, _UNREADABLE = range(4)

T = TypeVar("T")
Share = Callable[[Any], list[Any]]  # gathers a value from all ranks; collective


def read_together(read: Callable[[], T], share: Share) -> tuple[T | None, str | None]:
    """Calls `read` on every rank, with retries where it could not read; collective.

    Returns this rank's result and None; or, on all ranks, why the checkpoint is damaged. Raises
    TrainingFailure on all ranks if one of them cannot read, or does not find what others do.
    """
    result, kind, why = None, _UNREADABLE, ""
    answers: list[tuple[int, str, str]] = []
    for pause in (0.0, *PAUSES_S):
        time.sleep(pause)
        if kind in (_INCOMPLETE, _UNREADABLE):
            result, kind, why = _tried(read)
        answers = share((kind, why, socket.gethostname()))
        kinds = {answer[0] for answer in answers}
        if _UNREADABLE not in kinds and (_INCOMPLETE not in kinds or _DAMAGED in kinds):
            break
    wrong = [answer[1] for answer in answers if answer[0] in (_DAMAGED, _INCOMPLETE)]
    if _UNREADABLE in kinds or (_INCOMPLETE in kinds and _WHOLE in kinds and _DAMAGED not in kinds):
        worst = _UNREADABLE if _UNREADABLE in kinds else _INCOMPLETE
        rank = next(r for r, answer in enumerate(answers) if answer[0] == worst)
        _, why, host = answers[rank]
        raise TrainingFailure(
            f"on rank {rank}, host {host}: {why}, after {len(PAUSES_S) + 1} tries in "
            f"{sum(PAUSES_S):g} s; no checkpoint was touched: when the file system is well again, "
            "the same line goes on"
        )
    return (None, wrong[0]) if wrong else (result, None)


def _tried(read: Callable[[], T]) -> tuple[T | None, int, str]:
    try:
        return read(), _WHOLE, ""
    except IncompleteCheckpoint as error:
        return None, _INCOMPLETE, str(error)
    except DamagedCheckpoint as error:
        return None, _DAMAGED, str(error)
    except UnreadableCheckpoint as error:
        return None, _UNREADABLE, str(error)


def names_of_all(run: str | None, run_dir: Path, share: Share) -> list[str]:
    """Returns the names of the run's checkpoints that any rank sees, newest first; collective.

    Raises UserError if there are only damaged ones, as the run would begin anew although they may
    still be needed; TrainingFailure as `read_together`.
    """

    def here() -> tuple[list[str], list[str]]:
        with unreadable(str(run_dir)):
            found = list_checkpoints(run_dir), list_damaged(run_dir)
        return [p.name for p in found[0]], [p.name for p in found[1]]

    seen, _ = read_together(here, share)
    everyones = share(seen)
    names = {name for good, _ in everyones for name in good}
    damaged = sorted({name for _, bad in everyones for name in bad})
    if damaged and not names:
        raise UserError(
            f"run={run} has no checkpoint but {', '.join(damaged[:3])}"
            f"{' …' if damaged[3:] else ''} in {run_dir}, and does not begin again at step 1 "
            "beside what may be saved: give one its name back (step-…) if it is whole, or choose "
            "another run="
        )
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]), reverse=True)


def compared_with(manifest: Manifest, config: Config, corpus: Corpus | Blend | None) -> Compared:
    """Returns whether a run can go on from this checkpoint, and what to log of its files."""
    refusal = refusal_of(manifest, config, corpus)
    if refusal is not None or corpus is None:
        return Compared(refusal)
    return compare(corpus.watched, manifest.data.get("files", ""))


def refusal_of(manifest: Manifest, config: Config, corpus: Corpus | Blend | None) -> str | None:
    """Returns why a run cannot go on from this checkpoint with this config and text, or None."""
    sentence = identity.refusal(config.run, identity.changes(manifest.config, config))
    if sentence is not None or corpus is None or not manifest.data:
        return sentence
    here = facts_of(corpus)
    if {**manifest.data, "files": here["files"]} == here:  # times and inodes may change
        return None
    there = manifest.data.get("tokenizer", BYTE), here.get("tokenizer", BYTE)
    if there[0] != there[1]:
        return (
            f"run={config.run} cannot go on with another tokenizer: its digest is "
            f"{plain(there[0][:12])} there, now {there[1][:12]}; leave data.tokenizer to the run, "
            "or choose another run="
        )
    if "blend" in manifest.data and "blend" in here:
        return _other_blend(manifest, config, here["blend"])
    return (
        f"run={config.run} cannot go on with another text: its fingerprint is "
        f"{plain(manifest.data['fingerprint'][:12])} there, now {here['fingerprint'][:12]} "
        f"({manifest.data['train_tokens']} and {here['train_tokens']} tokens to train on); "
        f"give the data.path of the first start, or choose another run="
    )


def _other_blend(manifest: Manifest, config: Config, here: str) -> str | None:
    """Refuses another history of the samples that were read; the future may change."""
    samples = int(manifest.progress["consumed_samples"])
    if history_until(manifest.data["blend"], samples) == history_until(here, samples):
        return None
    tokens = samples * config.model.seq_length
    return (
        f"run={config.run} cannot go on with another blend: the weights or the texts of its first "
        f"{tokens:,} tokens are not what they were; give those of the first start, other ones "
        f"from here on as in 'data.blend_stages={{{tokens}:{{…}}}}', or choose another run="
    )


def facts_of(corpus: Corpus | Blend) -> DataFacts:
    facts = DataFacts(
        fingerprint=corpus.fingerprint,
        train_tokens=corpus.train_tokens,
        files=marks_of(corpus.watched),
    )
    if isinstance(corpus, Blend):
        facts["blend"] = corpus.history
    if corpus.tokenizer != BYTE:  # manifests of bytes are older than tokenizers
        facts["tokenizer"] = corpus.tokenizer
    return facts
