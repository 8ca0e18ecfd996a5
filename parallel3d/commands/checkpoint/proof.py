"""Proves an import: compares logits of the run's own configuration with those of transformers.

A model may change behind some position: a window begins to hide keys, LongRoPE changes its factors,
queries get another temperature. `changes_of` lists these positions for both models, and `rows_of`
makes rows of tokens that reach each of them. Rotary positions and temperatures are reached by a few
tokens with distant positions, and only windows need rows of many tokens.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.blueprint.parameters import parameter_count
from parallel3d.checkpoint.hf.quantization import QUANTIZED
from parallel3d.comm.group import SINGLE
from parallel3d.errors import UserError
from parallel3d.files import plain
from parallel3d.host.quotas import available_memory
from parallel3d.models.decoding import BlankInitializer
from parallel3d.models.dialect import LONGROPE
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.models.rotary import Positions, frequencies
from parallel3d.models.transformer import Stage
from parallel3d.text import count
from parallel3d.versions import TRIED, parts

TRANSFORMERS = "transformers"
LONGEST = 256  # number of tokens in a row, unless a window is longer
KEPT = 2 * LONGEST  # maximum number of tokens whose logits are compared
SPARSE = 24  # number of tokens at distant positions in a row
# Maximum of parameters · tokens in a row: half a minute on two cores.
MOST_WORK = 2e12
SHRUNK = LONGEST // 4  # window with which both models run if a row for their own is too long
# Tolerance relative to the largest logit. In fp32 two implementations of one model differ by about
# 1e-6, and the two most similar models (with gelu and its tanh approximation) by about 1e-3.
TOLERANCE = 1e-4
# transformers computes the angles of rotary positions in fp32, with frequencies that are wrong by
# up to this share. The angles of late positions are then wrong by position · frequency · share.
ANGLES = 2.0**-22
FREQUENCIES = 1e-5  # tolerance of a frequency, relative
# transformers' keys for positions at which a model changes: by a number of tokens, or by position.
_LENGTHS = re.compile(r"(sliding_window|attention_chunk_size)$")
_ORIGINAL = "original_max_position_embeddings"


class Change(NamedTuple):
    """A position at which a model changes.

    Attributes:
        position: the first position that is computed in another way.
        cause: the key and its value.
        by_length: whether only as many tokens reach it, and not a token at that position.
    """

    position: int
    cause: str
    by_length: bool


class ComparedRow(NamedTuple):
    """A row of tokens whose logits are compared.

    Attributes:
        positions: the tokens' positions, ascending.
        kept: indices of the tokens whose logits are compared.
        window: the window with which both models run in place of their own, or None.
    """

    positions: tuple[int, ...]
    kept: tuple[int, ...]
    window: int | None = None

    @property
    def is_dense(self) -> bool:
        return self.positions[-1] == len(self.positions) - 1


class TransformersOutput(NamedTuple):
    """The side of transformers.

    Attributes:
        rows: the rows of tokens.
        logits: the logits (kept, vocab_size) of each row.
        frequencies: for each row, the distinct frequencies of rotary positions with which the
            model ran; none if transformers does not show them.
        window: the window of its configuration, or None.
        changes: the positions at which either model changes.
    """

    rows: list[ComparedRow]
    logits: list[Tensor]
    frequencies: list[list[Tensor]]
    window: int | None
    changes: list[Change]


def why_not(model: ModelConfig) -> str | None:
    """Returns why an import cannot be compared with transformers here, or None if it can."""
    try:
        found = version(TRANSFORMERS)
    except PackageNotFoundError:
        return "transformers is not installed (pip install transformers)"
    # Versions before 5 drop the head if config.json ties it, and read other keys.
    oldest = TRIED[TRANSFORMERS].oldest
    if oldest is not None and parts(found) < parts(oldest):
        return f"transformers {found} is older than {oldest}, the oldest that an import compares"
    needed = 2 * 4 * parameter_count(model) + 3 * 4 * KEPT * model.vocab_size
    if needed > (free := available_memory()):
        return (
            f"the comparison would take {needed / 1e9:.1f} GB of memory, but only "
            f"{free / 1e9:.1f} GB are free"
        )
    return None


def changes_of(model: ModelConfig) -> list[Change]:
    """Returns the positions at which our model changes."""
    found = []
    if model.sliding_window is not None:
        cause = f"model.sliding_window={model.sliding_window}"
        found.append(Change(model.sliding_window, cause, by_length=True))
    scaled = any(rope.is_scaled for rope in model.ropes)
    if model.query_temperature or (scaled and model.rope_scaling == LONGROPE):
        original = model.rope_original_length
        found.append(Change(original, f"model.rope_original_length={original}", by_length=False))
    return found


def _their_changes(content: Mapping[str, Any]) -> Iterator[Change]:
    """Yields the positions that a configuration of transformers names, in inner objects too."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _their_changes(value)
        elif type(value) is int and value > 0 and (key == _ORIGINAL or _LENGTHS.match(key)):
            yield Change(value, f"{key}={value} of config.json", by_length=key != _ORIGINAL)


def rows_of(model: ModelConfig, changes: Sequence[Change]) -> list[ComparedRow]:
    """Returns rows of tokens that reach every change below `model.seq_length`."""
    end = model.seq_length
    windows = [c.position for c in changes if c.by_length and c.position < end]
    wanted = min(end, max([LONGEST, *(position + 2 for position in windows)]))
    dense = wanted if _is_cheap(model, wanted) else min(end, LONGEST)
    rows = [ComparedRow(tuple(range(dense)), _kept(dense, windows))]
    if dense < wanted:
        rows.append(rows[0]._replace(window=SHRUNK))
    distant = sorted({c.position for c in changes if not c.by_length and c.position < end})
    for position in distant:  # with LongRoPE, the last position decides about the whole row
        rows += [_sparse(last, distant) for last in (position - 1, position) if last > 0]
    if end > dense and (distant or model.position_embedding == "learned"):
        rows.append(_sparse(end - 1, distant))
    return list(dict.fromkeys(rows))


def _is_cheap(model: ModelConfig, tokens: int) -> bool:
    """Returns whether the comparison may have a row of so many tokens."""
    heads = max((kind.heads for kind in model.attention_kinds), default=0)
    scores = 4 * 4 * heads * tokens**2  # bytes of a layer's attention scores
    work = parameter_count(model) * tokens
    return tokens <= LONGEST or (work <= MOST_WORK and scores <= available_memory() / 4)


def _kept(tokens: int, windows: Sequence[int]) -> tuple[int, ...]:
    if tokens <= LONGEST:
        return tuple(range(tokens))
    near = {place for window in windows for place in range(window - 4, window + 4)}
    kept = {*range(LONGEST // 2), *near, *range(tokens - LONGEST // 2, tokens)}
    return tuple(sorted(place for place in kept if 0 <= place < tokens))


def _sparse(last: int, changes: Sequence[int]) -> ComparedRow:
    """Returns a row of few tokens from position 0 to `last`, on both sides of each change."""
    near = {n * c + step for c in changes for n in (1, 2, 3) for step in (-2, -1, 0, 1)}
    spread = {round(last * 2.0 ** (-n / 2)) for n in range(SPARSE)}
    positions = {*range(SPARSE // 3), *near, *spread, last - 1, last}
    found = tuple(sorted(p for p in positions if 0 <= p <= last))
    return ComparedRow(found, tuple(range(len(found))))


def tokens_of(model: ModelConfig, row: ComparedRow) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocab_size, (1, len(row.positions)), generator=generator)


def blank_model(model: ModelConfig, dtype: torch.dtype = torch.float32) -> Stage:
    """Returns the whole model as one stage, with zero weights."""
    model = dataclasses.replace(model, dropout=0.0)
    context = BuildContext(BlankInitializer(0, dtype, torch.device("cpu")), SINGLE, sp=False)
    return Stage(model, StageBlueprint.plain(range(model.num_layers), True, True), context)


@torch.no_grad()
def our_logits(
    stage: Stage, model: ModelConfig, row: ComparedRow, *, angles: float = 0.0
) -> Tensor:
    """Returns the logits (kept, vocab_size) of a row.

    The angles of rotary positions are wrong by the share `angles`, up and down by turns.
    """
    assert stage.embedding is not None and stage.head is not None
    tokens = tokens_of(model, row)
    inputs = stage.with_positions(LayerInputs(), *tokens.shape)
    if row.is_dense and not angles:
        x = stage.embedding(tokens, LayerInputs())
    else:
        x = stage.embedding.of_words(tokens)
        if stage.embedding.position is not None:
            x = x + stage.embedding.position[list(row.positions)]
        positions = _positions(stage, model, torch.tensor(row.positions), angles)
        if inputs.documents is not None and positions.temperature is not None:
            positions = positions._replace(temperature=positions.temperature.unsqueeze(0))
        inputs = dataclasses.replace(inputs, positions=positions)
    for block in stage.layers.values():
        x = block(x, inputs)
    return stage.head.logits(x[:, list(row.kept)])[0, :, : model.vocab_size]


def _positions(stage: Stage, model: ModelConfig, places: Tensor, angles: float) -> Positions:
    """Returns the rows of the stage's tables for a document with tokens at these positions."""
    length, rotary = int(places[-1]) + 1, []
    tables = zip(model.ropes, stage.rotary, stage.switches, strict=True)
    for rope, (cos, sin), switch in tables:
        rows = places + (switch if switch is not None and length > switch else 0)
        cos, sin = cos[rows], sin[rows]
        if angles:
            frequency, _ = frequencies(model, rope, length)
            shares = angles * (1.0 - 2.0 * (torch.arange(len(frequency)) % 2))
            wrong = torch.outer(places.double(), frequency * shares).unsqueeze(1)
            a, b = wrong.cos().to(cos.dtype), wrong.sin().to(cos.dtype)
            cos, sin = cos * a - sin * b, sin * a + cos * b
        rotary.append((cos, sin))
    temperature = None if stage.temperature is None else stage.temperature[places]
    return Positions(tuple(rotary), temperature)


def their_side(
    folder: Path,
    model: ModelConfig,
    *,
    wrapped: bool = False,
    alone: bool = False,
    weights: Mapping[str, Tensor] | None = None,
) -> TransformersOutput:
    """Runs a folder's model in transformers over the rows that reach its and our changes.

    `model` is the run's model. If `wrapped` is true, the folder has a vision model, whose text part
    is used; if `alone` is true, only its config.json is that of a vision model. `weights` take the
    place of the folder's quantized ones, because transformers computes with those on some devices,
    needs accelerate to read them, and guesses the size of blocks. Raises UserError if transformers
    fails.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            auto, classes = transformers.AutoModelForCausalLM, "MODEL_FOR_CAUSAL_LM_MAPPING"
            if wrapped:  # the text part of a vision model
                auto = transformers.AutoModelForImageTextToText
                classes = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"
            given: dict[str, Any] = {}
            if alone or weights is not None:
                whole = transformers.AutoConfig.from_pretrained(
                    folder, trust_remote_code=False, local_files_only=True
                )
                given = {"config": whole.get_text_config() if alone else whole}
            source: Path | None = folder
            if weights is not None:
                for part in (whole, whole.get_text_config()):
                    part.__dict__.pop(QUANTIZED, None)
                # Without a folder, only the class itself takes weights.
                auto = getattr(modeling_auto, classes)[type(given["config"])]
                source = None
                given["state_dict"] = dict(weights)
            theirs = auto.from_pretrained(
                source,
                **given,
                dtype=torch.float32,
                attn_implementation="eager",
                use_safetensors=True,  # so that nothing is unpickled
                trust_remote_code=False,
                local_files_only=True,
            ).eval()
            config = theirs.config.get_text_config()
            changes = [*changes_of(model), *_their_changes(config.to_dict())]
            rows, window = rows_of(model, changes), getattr(config, "sliding_window", None)
            logits, turns = [], []
            for row in rows:
                if row.window is not None and window is not None:
                    config.sliding_window = row.window
                logits.append(_logits(theirs, model, row))
                turns.append(_their_frequencies(theirs))
                if row.window is not None and window is not None:
                    config.sliding_window = window
            return TransformersOutput(rows, logits, turns, window, changes)
    except Exception as error:  # any kind of error is possible, because the folder is untrusted
        text = str(error).strip() or type(error).__name__
        raise UserError(
            f"from={folder}: transformers {version(TRANSFORMERS)} cannot load or run it "
            f"({plain(' '.join(text.split()))}); prove=false imports it without this test"
        ) from None


def _logits(theirs: Any, model: ModelConfig, row: ComparedRow) -> Tensor:
    given: dict[str, Any] = {"use_cache": False, "return_dict": True}
    tokens, kept = tokens_of(model, row), torch.tensor(row.kept)
    if not row.is_dense:
        # Without a mask, transformers would take each step between positions for a new document.
        given |= {"position_ids": torch.tensor([row.positions])}
        given |= {"attention_mask": torch.ones_like(tokens)}
    if len(kept) < tokens.shape[1]:
        given["logits_to_keep"] = kept
    logits = theirs(tokens, **given).logits[0]
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    return logits


def _their_frequencies(theirs: Any) -> list[Tensor]:
    """Returns the frequencies of rotary positions in the modules of a model of transformers."""
    return [
        buffer.clone()
        for name, buffer in theirs.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]


def verdict(
    folder: Path,
    model: ModelConfig,
    theirs: TransformersOutput,
    fill: Callable[[Stage], None],
    dtype: torch.dtype = torch.float32,
) -> str:
    """Returns a sentence on how close the logits are, and on the positions that were reached.

    `fill` loads the weights of the import into our model. Raises UserError if the logits differ by
    more than rounding, or a window or a frequency of rotary positions differs.
    """
    stage, window, worst, largest = None, None, 0.0, 0.0
    for row, logits, turns in zip(theirs.rows, theirs.logits, theirs.frequencies, strict=True):
        if stage is None or row.window != window:
            window, used = row.window, model
            if window is not None and model.sliding_window is not None:
                used = dataclasses.replace(model, sliding_window=window)
            stage = blank_model(used, dtype)
            fill(stage)
        ours = our_logits(stage, model, row).float()
        allowed = torch.full((len(row.kept), 1), TOLERANCE * float(logits.abs().max()))
        if row.positions[-1] >= LONGEST:  # adds what transformers' own angles may be wrong by
            rounded = our_logits(stage, model, row, angles=ANGLES).float()
            allowed = allowed + 2 * (rounded - ours).abs().amax(dim=1, keepdim=True)
        difference = (ours - logits).abs()
        worst = max(worst, float(difference.max()))
        largest = max(largest, float(logits.abs().max()))
        if not (difference <= allowed).all():  # also refuses NaN
            wrong = (~(difference <= allowed)).any(dim=1).nonzero()
            first = row.positions[row.kept[int(wrong[0])]]
            tokens = count(len(row.kept), "token")
            raise UserError(
                f"from={folder}: the logits of {tokens} differ from those of transformers "
                f"{version(TRANSFORMERS)} by up to {float(difference.max()):.3g}, from position "
                f"{first:,} of {row.positions[-1] + 1:,} on (the largest logit is "
                f"{float(logits.abs().max()):.3g}), so nothing is imported; prove=false imports "
                "the folder without this test"
            )
        _check_frequencies(folder, model, row, turns)
    # In trained models the oldest keys of a window hardly change a logit. If only transformers has
    # a window, it may be one that no layer uses, and the logits decide.
    if model.sliding_window not in (None, theirs.window):
        raise _differs(folder, f"model.sliding_window={model.sliding_window}", theirs.window)
    return (
        f"proven: the logits of {sum(len(row.kept) for row in theirs.rows)} tokens equal those of "
        f"transformers {version(TRANSFORMERS)} within {worst:.1e}; the largest logit is "
        f"{largest:.3g}; {_reach(model, theirs)}"
    )


def _check_frequencies(
    folder: Path, model: ModelConfig, row: ComparedRow, turns: list[Tensor]
) -> None:
    """Raises UserError unless transformers ran with each of our frequencies."""
    for rope in model.ropes if turns else []:
        ours, _ = frequencies(model, rope, row.positions[-1] + 1)
        same = [t for t in turns if t.shape == ours.shape]
        if not any(((t.double() - ours).abs() <= FREQUENCIES * ours).all() for t in same):
            raise _differs(folder, f"a rotary base of {rope.base:g} and its scaling", "other turns")


def _differs(folder: Path, ours: str, theirs: Any) -> UserError:
    return UserError(
        f"from={folder}: the run has {ours}, but transformers {version(TRANSFORMERS)} reads "
        f"{theirs}, so nothing is imported; prove=false imports the folder without this test"
    )


def _reach(model: ModelConfig, theirs: TransformersOutput) -> str:
    """Returns the end of the sentence: which positions the comparison reached, and which not."""
    end, dense = model.seq_length, len(theirs.rows[0].positions)
    last = max(row.positions[-1] for row in theirs.rows)
    words = [f"reached were positions 0 to {dense - 1:,}"]
    shrunk = any(row.window is not None for row in theirs.rows)
    for change in dict.fromkeys(theirs.changes):
        is_reached = change.position < end and not (change.by_length and shrunk)
        if is_reached and change in changes_of(model):
            words.append(f"both sides of {change.cause}")
    if last > dense - 1:
        words.append(f"some up to {last:,}")
    found = ", ".join(words)
    if shrunk and model.sliding_window is not None:
        found += (
            f"; not reached was model.sliding_window={model.sliding_window}, which transformers "
            f"reads as well, and both models ran with {SHRUNK} in its place"
        )
    if last < end - 1:
        found += f"; not reached were positions {last + 1:,} to {end - 1:,}"
        found += "" if shrunk else ", where nothing changes"
    if model.ropes and not all(theirs.frequencies):
        found += (
            "; not compared were the frequencies of rotary positions, which transformers does not "
            "show for this model"
        )
    return found
