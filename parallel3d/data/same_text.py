"""Says what a checkpoint records about the training text, and whether a run reads the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from parallel3d.data.corpus import Blend, history_until
from parallel3d.data.sampler import TrainingText
from parallel3d.data.tokenizer import BYTE
from parallel3d.data.tokens import TextComparison, compare, marks_of
from parallel3d.files import plain

# Keys that choose the text and may change at a resume. The tokenizer is not among them, as its path
# may change: it is compared by its digest and its templates.
DATE = "data.chat_date"
CHOOSE_TEXT = ("data.name", "data.path", "data.blend", "data.blend_stages", DATE)
# The date that Llama's templates show for want of another, as in runs from before `data.chat_date`.
DATE_OF_OLDER = "2024-07-26"


class DataFacts(TypedDict, total=False):
    """Describes the training text in a checkpoint; keys that do not apply are absent."""

    fingerprint: str
    train_tokens: int
    files: str  # marks of the files (`marks_of`), which reveal changes
    blend: str  # the blend's history: `first sample:digest` of each stage, separated by spaces
    tokenizer: str  # digest of the tokenizer; absent if the tokens are bytes


def facts_of(corpus: TrainingText) -> DataFacts:
    """Returns what a checkpoint records about the training text."""
    facts = DataFacts(
        fingerprint=corpus.fingerprint,
        train_tokens=corpus.train_tokens,
        files=marks_of(corpus.watched),
    )
    if isinstance(corpus, Blend):
        facts["blend"] = corpus.history
    if corpus.tokenizer != BYTE:
        # Texts read as bytes get no entry, as in manifests from before tokenizers were supported.
        facts["tokenizer"] = corpus.tokenizer
    return facts


def compare_text(
    there: DataFacts,
    corpus: TrainingText,
    run: str | None,
    seq_length: int,
    samples: int | None,
    changed: Sequence[str],
) -> TextComparison:
    """Compares the text that a checkpoint records with the text of a run that resumes from it.

    The result has the reason if the run cannot resume with this text; otherwise it may have a note
    on the files.

    Args:
        there: what the checkpoint records; empty if its run brought its own samples.
        corpus: the text of the run.
        run: the name of the run.
        seq_length: tokens of a sample.
        samples: number of samples read before the checkpoint; None for a run that only evaluates,
            which may read another text with the same tokenizer.
        changed: the keys of CHOOSE_TEXT that have other values now, as they were: data.path=x.
    """
    if there and (refusal := _refusal(there, facts_of(corpus), run, seq_length, samples, changed)):
        return TextComparison(refusal)
    if samples is None:
        return TextComparison()
    return compare(corpus.watched, there.get("files", ""))


def _refusal(
    there: DataFacts,
    here: DataFacts,
    run: str | None,
    seq_length: int,
    samples: int | None,
    changed: Sequence[str],
) -> str | None:
    # The files' marks contain times and inodes, which may change.
    if {**there, "files": here["files"]} == here:
        return None
    old, new = there.get("tokenizer", BYTE), here.get("tokenizer", BYTE)
    if old != new:
        return (
            f"run={run} cannot resume with another tokenizer: its digest is "
            f"{plain(old[:12])} in the checkpoint, but {new[:12]} now; leave "
            "data.tokenizer out, or choose another run="
        )
    if samples is None:
        return None
    if "blend" in there and "blend" in here:
        return _other_blend(there["blend"], here["blend"], run, seq_length, samples)
    remedy = "give the data.path of the first start"
    if changed:
        remedy = f"give {' '.join(map(plain, changed[:3]))} as there"
    return (
        f"run={run} cannot resume with another text: its fingerprint is "
        f"{plain(there['fingerprint'][:12])} in the checkpoint, but "
        f"{here['fingerprint'][:12]} now ({there['train_tokens']} and "
        f"{here['train_tokens']} tokens to train on); {remedy}, or choose another run="
    )


def _other_blend(
    there: str, here: str, run: str | None, seq_length: int, samples: int
) -> str | None:
    """Returns why a run cannot resume with the blend `here`, or None if it can.

    The blend must be the same for the samples read so far, and may change for later ones.
    """
    if history_until(there, samples) == history_until(here, samples):
        return None
    tokens = samples * seq_length
    return (
        f"run={run} cannot resume with another blend: the weights or the texts of its first "
        f"{tokens:,} tokens have changed; restore them, and give new weights or texts only from "
        f"there on, as in 'data.blend_stages={{{tokens}:{{…}}}}', or choose another run="
    )
