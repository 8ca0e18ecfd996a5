"""Scores the rows of `parallel3d eval` on every rank.

Scores of different layouts differ only by rounding.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.build import groups_of_run
from parallel3d.comm.exchange import all_gather_json, transfer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.evaluate.rows import (
    Likelihood,
    TaskRow,
    chosen,
    encode_pair,
    figures_of,
    read_rows,
)
from parallel3d.commands.generate import load_newest
from parallel3d.commands.options import CommandConfig, EvalConfig
from parallel3d.context_parallel.documents import Documents, whole_samples
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.data.tokenizer import BYTE, Tokenizer, check_tokens, open_tokenizer
from parallel3d.errors import UserError, print_line
from parallel3d.files import no_link
from parallel3d.metrics.recorder import layout_row
from parallel3d.models.decoding import blank_stage
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.rotary import length_with_short_factors
from parallel3d.models.transformer import Stage
from parallel3d.resolve import blueprint_of
from parallel3d.run.directory import folder_in_run
from parallel3d.run.launch import Worker
from parallel3d.tensor_parallel.mappings import gather_from_vocabulary
from parallel3d.text import aligned

LOGIT_TOKENS = 256  # maximum number of tokens whose logits are in memory at a time


class Request(NamedTuple):
    """Contains the tokens of a row's context, followed by those of one choice.

    The tokens from index `first` on are scored.
    """

    row: int
    choice: int
    tokens: list[int]
    first: int


def evaluate(config: CommandConfig, worker: Worker) -> None:
    """Scores the rows; rank 0 prints a table and writes the result as JSON.

    Raises UserError if the rows are invalid or the run has no checkpoint that can be loaded.
    """
    worker.phase = "making process groups"
    groups = groups_of_run(config, worker.device, worker.placement)
    device = torch.device(worker.device)
    worker.phase = "reading the rows"
    assert config.eval.tasks is not None  # `from_run.config_from_run` has checked this
    rows = read_rows(config.eval.tasks)
    tokenizer, model = open_tokenizer(config.data.tokenizer or BYTE), config.model
    most = length_with_short_factors(model)
    requests = requests_of(rows, tokenizer, model.seq_length, most)
    for request in requests:
        check_tokens(request.tokens, tokenizer, model.vocab_size, rows[request.row].place)
    worker.phase = "loading the checkpoint"
    stage = blank_stage(blueprint_of(config), groups, device)
    manifest = load_newest(Path(config.runs_dir, str(config.run)), config.eval, stage, groups)
    worker.phase = "scoring"
    scores = score_requests(requests, stage, groups, config.eval.batch_tokens, model.hidden_size)
    check_finite(scores.values(), str(config.run))
    if worker.rank == 0:
        of_rows = [[scores[i, k] for k in range(len(row.choices))] for i, row in enumerate(rows)]
        of_run = {
            "run": config.run,
            "step": manifest.step,
            "weights": config.eval.weights,
            "tasks": config.eval.tasks,
            "layout": layout_row(groups.layout),
            "precision": config.precision.name,
        }
        report(of_run, config.eval, config.runs_dir, rows, of_rows)
    groups.close()


def score_requests(
    requests: Sequence[Request],
    stage: Stage,
    groups: ProcessGroups,
    batch_tokens: int,
    hidden_size: int,
) -> dict[tuple[int, int], Likelihood]:
    """Returns the likelihoods by (row, choice) on every rank. The call is collective."""
    mine: list[tuple[int, int, Likelihood]] = []
    for number, batch in enumerate(batches_of(requests, batch_tokens, stage.switch)):
        if number % groups.dp.size == groups.dp.index:
            found = likelihoods(stage, groups, batch, hidden_size)
            mine += [(r.row, r.choice, f) for r, f in zip(batch, found, strict=False)]
    own, device = mine if groups.tp.index == 0 else [], next(stage.parameters()).device
    everyones = all_gather_json(own, groups.world.handle, device)
    scores: dict[tuple[int, int], Likelihood] = {}
    for row, k, found in (one for part in everyones for one in part):
        scores[row, k] = Likelihood(*found).plus(scores.get((row, k)))
    return scores


def check_finite(found: Iterable[Likelihood], run: str) -> None:
    """Raises UserError if a likelihood is NaN or infinite."""
    if not all(math.isfinite(one.total) for one in found):
        raise UserError(
            f"run={run}: the weights of this checkpoint give log-likelihoods that are not "
            "finite; give step= of an earlier one"
        )


def requests_of(
    rows: Sequence[TaskRow], tokenizer: Tokenizer, window: int, most: int | None = None
) -> list[Request]:
    """Returns a request for each choice of each row, the longest request first.

    If a context is too long for `window`, the model's sequence length, its beginning is cut off.
    Raises UserError for a continuation without tokens, or with more than `window`, and for a row
    with more than `most` inputs, which the model would rotate with other factors if it were not
    cut.
    """
    found = []
    for i, row in enumerate(rows):
        for k, choice in enumerate(row.choices):
            tokens, first = encode_pair(tokenizer, row.context, choice)
            scored = len(tokens) - first
            if not 0 < scored <= window:
                raise UserError(
                    f"{row.place}: the continuation {choice[:40]!r} has {scored:,} tokens after "
                    f"its context, but must have from 1 to model.seq_length={window}; give "
                    f"{'a longer' if scored < 1 else 'a shorter'} one"
                )
            if most is not None and len(tokens) - 1 > most:
                raise UserError(
                    f"{row.place} has {len(tokens) - 1:,} tokens, which this model rotates with "
                    f"LongRoPE's long factors, but model.seq_length={window} only has the short "
                    f"ones, for up to {most:,} tokens; give shorter rows, or import the model with "
                    "a longer model.seq_length"
                )
            cut = max(0, len(tokens) - (window + 1))
            found.append(Request(i, k, tokens[cut:], first - cut))
    return sorted(found, key=lambda r: -len(r.tokens))


def batches_of(
    requests: Sequence[Request], batch_tokens: int, switch: int | None = None
) -> list[list[Request]]:
    """Returns batches of consecutive requests.

    A batch has at most `batch_tokens` tokens with padding, or is a single longer request. Inputs
    with more than `switch` tokens are in other batches than the rest, because the model rotates
    the two in different ways (`Stage.switch`).
    """
    batches: list[list[Request]] = []
    for request in requests:
        first = batches[-1][0].tokens if batches else []
        alike = switch is None or (len(first) - 1 > switch) == (len(request.tokens) - 1 > switch)
        if batches and alike and (len(batches[-1]) + 1) * len(first) <= batch_tokens:
            batches[-1].append(request)
        else:
            batches.append([request])
    return batches


@torch.no_grad()
def likelihoods(
    stage: Stage, groups: ProcessGroups, batch: Sequence[Request], hidden: int
) -> list[Likelihood]:
    """Returns the likelihoods of a batch on the last stage, and an empty list on other stages.

    Each context-parallel rank scores the tokens that it holds. The call is collective over
    tp × cp × pp.
    """
    device, length = next(stage.parameters()).device, len(batch[0].tokens) - 1
    padded = [r.tokens + [0] * (length + 1 - len(r.tokens)) for r in batch]
    tokens = torch.tensor(padded)
    given, documents = tokens[:, :-1], None
    place_of = {position: position for position in range(length)}
    if groups.cp.size > 1:
        ranks = groups.cp.size, groups.cp.index
        window, hands_states = stage.window, stage.hands_states
        split = SequenceSplit(length, *ranks, window=window, hands_states=hands_states)
        documents = whole_samples(len(batch), device, split)
        assert documents.shard is not None
        given = torch.from_numpy(documents.shard.take(given.numpy()))
        held = documents.shard.held[groups.cp.index, 0].tolist()
        place_of = {position: place for place, position in enumerate(held)}
    x = hidden_states(stage, groups, given.to(device), hidden, documents)
    if stage.head is None:
        return []
    scored = [
        (k, place_of[at], at)
        for k, r in enumerate(batch)
        for at in range(r.first - 1, len(r.tokens) - 1)
        if at in place_of
    ]
    rows, places, positions = torch.tensor(scored, dtype=torch.int64).view(-1, 3).unbind(1)
    x, labels = x[rows, places], tokens[rows, positions + 1].to(device)
    parts = [
        _log_probabilities(stage, groups, x[first : first + LOGIT_TOKENS], part)
        for first, part in zip(
            range(0, max(1, len(scored)), LOGIT_TOKENS), labels.split(LOGIT_TOKENS), strict=True
        )
    ]
    found, best = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    counts = torch.bincount(rows, minlength=len(batch)).tolist()
    return [
        Likelihood(float(one.sum()), len(one), bool(likeliest.all()))
        for one, likeliest in zip(found.split(counts), best.split(counts), strict=True)
    ]


def hidden_states(
    stage: Stage, groups: ProcessGroups, tokens: Tensor, hidden: int, documents: Documents | None
) -> Tensor:
    """Returns the hidden states (b, s, h) that a stage computes for `tokens` (b, s).

    On the last stage, the hidden states are the input of the head. Every other stage also sends
    them to the next stage. `hidden` is the hidden size h.
    """
    pp, inputs = groups.pp, LayerInputs(documents=documents)
    if stage.embedding is not None:
        x = stage.embedding(tokens, inputs)
    else:
        example = next(stage.parameters())
        x = torch.empty((*tokens.shape, hidden), dtype=example.dtype, device=example.device)
        assert pp.handle is not None  # a stage without an embedding is one of several
        transfer(dist.irecv, x, pp.ranks[pp.index - 1], pp.handle)
    inputs = stage.with_positions(inputs, *tokens.shape)
    for block in stage.blocks.values():
        x = block(x, inputs)
    if stage.head is None:
        assert pp.handle is not None
        transfer(dist.isend, x.contiguous(), pp.ranks[pp.index + 1], pp.handle)
    return x


def _log_probabilities(
    stage: Stage, groups: ProcessGroups, x: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each label in fp64, and whether it is the likeliest token.

    Both have shape (n,); `x` is the input of the head with shape (n, h).
    """
    assert stage.head is not None
    logits = gather_from_vocabulary(stage.head.logits(x.unsqueeze(0)), groups.tp)[0]
    logits = logits[:, : stage.head.model.vocab_size].double()
    found = logits.log_softmax(-1).gather(1, labels.unsqueeze(1)).squeeze(1)
    return found, logits.argmax(-1) == labels


def report(
    of_run: Mapping[str, Any],
    keys: EvalConfig,
    runs_dir: str,
    rows: Sequence[TaskRow],
    scores: Sequence[Sequence[Likelihood]],
) -> None:
    """Prints a table and writes the result to `eval.to`, or to a new file in the run directory.

    `of_run` contains the first entries of the result, such as the run, the step and the layout.
    """
    pairs = list(zip(rows, scores, strict=True))
    tasks = list(dict.fromkeys(row.task for row in rows))
    figures = {t: figures_of(pair for pair in pairs if pair[0].task == t) for t in tasks}
    if len(tasks) > 1:
        figures["all rows"] = figures_of(pairs)
    result = {
        **of_run,
        "figures": figures,
        "rows": [_scores(row, found) for row, found in pairs],
    }
    run, step = str(of_run["run"]), int(of_run["step"])
    weights = ", weights=ema" if keys.weights == "ema" else ""
    print(f"run={run}, step {step}{weights}\n" + table(figures))
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    path = _new_file(keys, runs_dir, run, step)
    with os.fdopen(no_link(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(text.encode("utf-8", "replace"))
    print_line(f"the scores of {len(rows):,} rows are in {path}")


def _new_file(keys: EvalConfig, runs_dir: str, run: str, step: int) -> Path:
    if keys.to is not None:
        return Path(keys.to)
    assert keys.tasks is not None
    folder = folder_in_run(runs_dir, run, "eval")
    name, number = f"{Path(keys.tasks).name.partition('.')[0]}-step-{step}", 1
    if keys.weights != "model":
        name += f"-{keys.weights}"
    while (path := folder / f"{name}{f'-{number}' if number > 1 else ''}.json").exists():
        number += 1
    return path


def _scores(row: TaskRow, found: Sequence[Likelihood]) -> dict[str, Any]:
    by_choice = {
        "loglikelihoods": [one.total for one in found],
        "tokens": [one.tokens for one in found],
        "greedy": [one.greedy for one in found],
    }
    if row.answer is None:
        return {"task": row.task} | by_choice
    best, best_norm = chosen(row, found)
    picked = {"chosen": best, "chosen_norm": best_norm, "answer": row.answer}
    return {"task": row.task} | by_choice | picked


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Formats the metrics of each task (`figures_of`) as a table."""
    heads = ("task", "rows", "acc", "acc_norm", "log-likelihood a token", "perplexity")
    lines = [heads]
    for task, one in figures.items():
        norm = "" if one["acc_norm"] is None else f"{one['acc_norm']:.4f}"
        each = f"{one['loglikelihood_per_token']:.4f}", f"{one['perplexity']:.5g}"
        lines.append((task, f"{one['rows']:,}", f"{one['acc']:.4f}", norm, *each))
    return "\n".join(aligned(lines, "<>>>>>"))
