"""What each choice of the best layout is worth: the best layout that differs from it there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel3d.plan.search import Choice, Priced

# (fields that change together, how the knob is called, what it is for)
KNOBS = (
    (("tp",), "tp", "how many GPUs share each layer"),
    (("pp",), "pp", "how many stages the layers are cut into"),
    (("micro_batch",), "micro_batch_size", "sequences that pass at a time"),
    (("schedule", "vpp"), "schedule", "the order of forwards and backwards"),
    (("recompute",), "recompute", "activations made again instead of kept"),
    (("zero",), "zero", "what is cut over the replicas"),
)


@dataclass(frozen=True)
class Change:
    """One other value of a knob: the best layout with it, or why there is none."""

    knob: str
    meaning: str
    best: str
    other: str
    slower: float  # of the step, as a share
    over: float  # bytes that are missing where it does not fit, else 0
    alone: bool  # nothing else has to change


def changes(priced: Priced, first: int, room: float) -> list[Change]:
    """For each knob its nearest rival: the fastest layout that has another value of it."""
    best, made = priced.choices[first], []
    for names, knob, meaning in KNOBS:
        rivals = [
            i for i in priced.order if _differs(priced.choices[i], best, names) and i != first
        ]
        rival = min(rivals, key=lambda i: priced.seconds[i], default=None)
        mine = _said(best, names)
        if rival is not None:
            other = priced.choices[rival]
            slower = float(priced.seconds[rival] / priced.seconds[first]) - 1
            alone = not _differs(_with(other, best, names), best, None)
            made.append(Change(knob, meaning, mine, _said(other, names), slower, 0.0, alone))
        refused = _refused(priced, best, names)
        if refused is not None:
            over = float(priced.memory.total[refused]) - room
            value = _said(priced.choices[refused], names)
            slower = float(priced.seconds[refused] / priced.seconds[first]) - 1
            if slower < 0:
                made.append(Change(knob, meaning, mine, value, slower, over, True))
    return made


def _refused(priced: Priced, best: Choice, names: tuple[str, ...]) -> int | None:
    """The fastest that differs from the best in this alone and does not fit."""
    found = [
        i
        for i, choice in enumerate(priced.choices)
        if not priced.fits[i]
        and _differs(choice, best, names)
        and not _differs(_with(choice, best, names), best, None)
    ]
    return min(found, key=lambda i: priced.seconds[i], default=None)


def _differs(one: Choice, other: Choice, names: tuple[str, ...] | None) -> bool:
    if names is None:
        return replace(one, dp=other.dp) != other
    return any(getattr(one, name) != getattr(other, name) for name in names)


def _with(choice: Choice, best: Choice, names: tuple[str, ...]) -> Choice:
    return replace(choice, **{name: getattr(best, name) for name in names})


def _said(choice: Choice, names: tuple[str, ...]) -> str:
    if names[0] == "schedule":
        chunks = f", vpp={choice.vpp}" if choice.vpp > 1 else ""
        return f"{choice.schedule}{chunks}" if choice.pp > 1 else "no pipeline"
    return str(getattr(choice, names[0]))
