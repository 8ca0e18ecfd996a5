"""Draws runs that resume: with other batches, from old or unusual checkpoints, and in W&B."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.inputs.door_inputs.answers import REFUSAL, Input
from parallel3d.checkpoint.identity import decisive
from parallel3d.config.length import Length, clock_of
from parallel3d.errors import UserError
from parallel3d.metrics.wandb_ledger import Ledger, Row, UnknownRows, begin, read_rows
from parallel3d.optim.optimizer import learning_rate
from parallel3d.run_config import Config

LR, MIN_LR = 1e-3, 1e-5
SEQUENCES = (1, 7, 64, 128, 4096)
BATCHES = (1, 2, 3, 4, 7, 8, 12, 16, 24, 32, 48, 63, 64, 100, 256, 1000)
HARMS_OF_CLOCKS = ("sizes", "first", "order", "size", "kind")
HARMS_OF_RECORDS = ("type", "kind", "item", "step", "text", "array", "nothing")


def config_of(
    sequence: int, length: Mapping[str, Any], batch: Any, style: str = "linear"
) -> Config:
    """Returns a configuration with these keys; `batch` is a size, or sizes by samples."""
    config = Config()
    last = batch if isinstance(batch, int) else [*batch.values()][-1]
    schedule = None if isinstance(batch, int) else batch
    return dataclasses.replace(
        config,
        global_batch_size=last,
        model=dataclasses.replace(config.model, seq_length=sequence),
        train=dataclasses.replace(config.train, batch_schedule=schedule, **length),
        optim=dataclasses.replace(config.optim, lr=LR, min_lr=MIN_LR, lr_decay_style="linear"),
    )


def size_at(batch: Any, read: int) -> int:
    if isinstance(batch, int):
        return batch
    return next(size for first, size in reversed(batch.items()) if first <= read)


def lives(rng: random.Random) -> Iterator[Input]:
    """Yields runs by steps or tokens whose batch changes up to four times; each checkpoint is
    JSON."""
    while True:
        sequence, budget = rng.choice(SEQUENCES), rng.randint(1, 3000)
        by_steps = rng.random() < 0.25
        batches = [draw_batch(rng, budget) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.3:
            batches.append(batches[0])
        tokens = budget * sequence - rng.randrange(sequence)
        length = {"steps": budget} if by_steps else {"tokens": float(tokens)}
        # Computed independently: the samples after each step, and the end of each start.
        read = 0
        after: list[int] = []
        cuts: list[int] = []
        for batch in batches[:-1]:
            for _ in range(rng.randint(0, 40)):
                if len(after) >= budget if by_steps else read >= budget:
                    break
                read += size_at(batch, read)
                after.append(read)
            cuts.append(len(after))
        if not cuts or cuts[-1] == 0:
            cuts, batches, read, after = [], batches[-1:], 0, []
        while len(after) < budget if by_steps else read < budget:
            read += size_at(batches[-1], read)
            after.append(read)
        rates: list[float] = []
        plain = not by_steps and all(isinstance(batch, int) for batch in batches)
        if plain:  # linear in the samples, in the first start's steps
            first = next(b for b, cut in zip(batches, [*cuts, 1], strict=True) if cut)
            end = -(-budget // first)
            shares = [min(1.0, one / first / end) for one in after]
            shares[-1] = 1.0
            rates = [MIN_LR + (LR - MIN_LR) * (1 - share) for share in shares]
        shown_rates: list[float] | float = [round(rate, 12) for rate in rates]
        right = len(after), after[-1], shown_rates or round(MIN_LR, 12)
        text = f"train {length} seq_length={sequence}, batches {batches} from steps {[0, *cuts]}"

        def take(
            sequence: int = sequence,
            length: Mapping[str, Any] = length,
            batches: list[Any] = batches,
            cuts: list[int] = cuts,
            plain: bool = plain,
        ) -> object:
            steps = read = 0
            clock, rates = None, []
            for batch, until in zip(batches, [*cuts, None], strict=True):
                config = config_of(sequence, length, batch)
                found = Length.of_run(config, steps, read, clock)
                last = found.last_step if until is None else until
                for step in range(steps + 1, last + 1):
                    rates.append(learning_rate(config.optim, found.end, found.place(step)))
                steps, read = last, found.sizes.samples(last)
                kept: dict[str, Any] = {"steps": steps, "consumed_samples": read}
                kept["clock"] = found.clock_at(steps, read)
                clock = clock_of(json.loads(json.dumps(kept)), dataclasses.asdict(config))
            shown = [round(rate, 12) for rate in rates]
            return steps, read, shown if plain else shown[-1]

        yield Input(text, take, right, common=True)


def draw_batch(rng: random.Random, budget: int) -> Any:
    if rng.random() < 0.75:
        return rng.choice(BATCHES)
    firsts = sorted({0, *(rng.randint(1, max(2, budget)) for _ in range(rng.randint(1, 3)))})
    return {first: rng.choice(BATCHES) for first in firsts}


def clocks(rng: random.Random) -> Iterator[Input]:
    """Yields checkpoints without a clock, and clocks that somebody changed."""
    while True:
        batch, steps = rng.choice(BATCHES), rng.randint(1, 999)
        progress = {"steps": steps, "consumed_samples": batch * steps}
        config = json.loads(json.dumps(dataclasses.asdict(config_of(64, {"steps": 9}, batch))))
        kept: Any = {"steps": 0, "samples": 0, "sizes": [[0, batch]]}
        harm = rng.choice(
            ["none", "old", "old, changed", "sizes", "first", "order", "size", "kind"]
        )
        right: object = steps
        if harm == "old, changed":
            progress["consumed_samples"] += rng.randint(1, 99)
        elif harm not in ("none", "old"):
            right = REFUSAL
        if harm == "sizes":
            kept["sizes"] = rng.choice([[], 3, None, [[0]], [[0, "x"]], {"0": 8}])
        if harm == "first":
            kept["sizes"][0][0] = rng.choice([1, -1, "a", None])
        if harm == "order":
            kept["sizes"] = [[0, 8], [9, 4], [rng.choice([0, 5, 9]), 2]]
        if harm == "size":
            kept["sizes"][0][1] = rng.choice([0, -8, None, "eight"])
        if harm == "kind":
            kept = rng.choice([[], "clock", 7, {"sizes": [[0, 8]]}, {"steps": 1, "samples": 2}])

        def take(
            harm: str = harm,
            progress: Mapping[str, Any] = progress,
            kept: Any = kept,
            config: Mapping[str, Any] = config,
        ) -> object:
            whole = progress if harm.startswith("old") else {**progress, "clock": kept}
            try:
                clock = clock_of(whole, config)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                # The reader of manifests reports this.
                raise UserError(f"damaged: {error!r}") from None
            return None if clock is None else clock.place(progress["consumed_samples"])

        known = harm in ("none", "old", "old, changed")
        yield Input(f"checkpoint {progress}, clock {harm} {kept}", take, right, common=known)


def records(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Yields outputs of W&B's tool: rows in other spellings, other orders and among other
    records."""
    path = folder / "run-x.wandb"
    path.write_bytes(bytes(50_000))
    while True:
        last = rng.randint(1, 500)
        rows = [{"step": step, "train/lr": 1e-3, "tokens": step} for step in range(1, last + 1, 7)]
        rows.append({"step": last, "train/lr": 1e-3})
        is_evaluation = rng.random() < 0.4
        if is_evaluation:
            names = rng.choice([{"eval/loss": 1.0}, {"valid/a/loss": 2.0}, {}])
            rows.append({"step": last, **names})
        right: object = Row(last, is_evaluation)
        found: list[Any] = [{"type": "history", "history": {"item": row}} for row in rows]
        found.insert(0, {"type": "run", "run": {"run_id": "a-b"}})
        for kind in rng.choices(["stats", "summary", "metric", "request"], k=rng.randint(0, 4)):
            other = {"type": kind, kind: {"item": {"step": 9999}}}
            found.insert(rng.randint(1, len(found)), other)
        harm = rng.choice(
            ["none"] * 4 + ["type", "kind", "item", "step", "text", "array", "nothing"]
        )
        if harm != "none":
            right = REFUSAL
        if harm == "type":  # another spelling of the same value
            found = [{**one, "type": one["type"].title()} for one in found]
        if harm == "kind":
            found = [{**{"kind": one["type"]}, **one} for one in found]
            found = [{k: v for k, v in one.items() if k != "type"} for one in found]
        if harm == "item":
            found = [one if one["type"] != "history" else {**one, "history": {}} for one in found]
        if harm == "step":
            found = [{"type": "history", "history": {"item": {"_step": 3}}}]
        lines = [spell(rng, one) for one in found]
        if harm == "text":
            lines.insert(rng.randint(0, len(lines)), b"wandb: loading\n")
        if harm == "array":
            lines = [json.dumps(found).encode()]
        if harm == "nothing":
            lines = []

        def take(lines: list[bytes] = lines) -> object:
            try:
                return read_rows(path, lambda _: iter(lines))
            except UnknownRows as error:
                raise UserError(str(error)) from None

        yield Input(f"wandb leet inspect: {harm}, to step {last}", take, right, harm == "none")


def spell(rng: random.Random, record: Mapping[str, Any]) -> bytes:
    """Returns a record as one line of JSON, with more or fewer blanks, in another order of keys."""
    separators = rng.choice([(",", ":"), (", ", ": "), (" , ", " : ")])
    pairs = list(record.items())
    rng.shuffle(pairs)
    return json.dumps(dict(pairs), separators=separators).encode() + rng.choice([b"\n", b"\r\n"])


def ids(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Yields starts of runs in W&B: the id is kept, given by an agent, or new."""
    number = 0
    while True:
        number += 1
        runs = folder / f"runs-{number}"
        run_dir = runs / rng.choice(["a", "llama-8b", "run 1", "1.10"])
        kept = rng.choice([None, "abc", "llama-8b-v2", "2026-01-01", "a_b"])
        environ = {}
        if rng.random() < 0.5:
            environ["WANDB_RUN_ID"] = rng.choice(["mine", "abc", "x-y-z"])
        if rng.random() < 0.4:
            environ["WANDB_SWEEP_ID"] = "s1"
        given = environ.get("WANDB_RUN_ID")
        sibling = rng.choice([None, given])
        run_dir.mkdir(parents=True)
        if sibling:
            (runs / "other").mkdir()
            (runs / "other" / "wandb-id").write_text(sibling)
        right = kept or "a new id"
        if kept is None and given and "WANDB_SWEEP_ID" in environ and not sibling:
            right = given
        first, last, lr = rng.randint(1, 90), rng.randint(1, 99), rng.choice([LR, LR, 3e-4])
        if kept:
            (run_dir / "wandb-id").write_text(f"{kept}\n")
            ledger = Ledger(run_dir)
            ledger.begin(kept, "gone", 1, decisive(config_of(64, {"steps": 9}, 8)))
            ledger.sent(Row(last, False), closed=True)
            if lr != LR and last >= first:
                right = "a new id"
        before = {path.read_text().strip() for path in runs.glob("*/wandb-id")}

        def take(
            run_dir: Path = run_dir,
            first: int = first,
            environ: Mapping[str, str] = environ,
            lr: float = lr,
            kept: str | None = kept,
            before: set[str] = before,
        ) -> object:
            config = config_of(64, {"steps": 9}, 8)
            config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=lr))
            found = begin(run_dir, first, decisive(config), environ).id
            is_new = found not in before and found != environ.get("WANDB_RUN_ID")
            return "a new id" if is_new else found

        text = (
            f"wandb-id {kept}, {environ}, resumes at {first} of {last}, lr {lr}, beside {sibling}"
        )
        yield Input(text, take, right, common=True)


def inputs(rng: random.Random, folder: Path) -> Iterator[Input]:
    kinds = [lives(rng), lives(rng), clocks(rng), records(rng, folder), ids(rng, folder)]
    while True:
        yield next(rng.choice(kinds))
