"""Why a layout stands where it stands, in one line."""

from __future__ import annotations

from parallel3d.plan.search import FULL, LayoutChoice, Priced

STEP_PARTS = ("compute", "bubble", "messages", "gradients", "optimizer")


def reason(priced: Priced, index: int, first: int, node: int) -> str:
    """What the layout gains or loses against the best one, `first`."""
    choice, total = priced.choices[index], float(priced.seconds[index])
    shares = {part: _seconds(priced, part, index) / total for part in STEP_PARTS}
    if index == first:
        rest = max(STEP_PARTS[1:], key=lambda part: shares[part])
        words = f"{100 * shares['compute']:.0f} % of the step computes"
        if shares[rest] > 0.005:
            words += f"; most of the rest is {_named(rest, choice)} ({100 * shares[rest]:.0f} %)"
        return words + _memory(priced, index)
    slower = total - float(priced.seconds[first])
    more = {
        part: _seconds(priced, part, index) - _seconds(priced, part, first) for part in STEP_PARTS
    }
    worst = max(STEP_PARTS, key=lambda part: more[part])
    if slower <= 0.005 * total or more[worst] <= 0:
        return "as fast, with more to set up" + _memory(priced, index)
    words = f"+{100 * more[worst] / float(priced.seconds[first]):.0f} % "
    words += (
        _compute(choice, priced.choices[first], node)
        if worst == "compute"
        else (_named(worst, choice))
    )
    return words + _memory(priced, index)


def _seconds(priced: Priced, part: str, index: int) -> float:
    return float(getattr(priced.time, part)[index])


def _named(part: str, choice: LayoutChoice) -> str:
    """The part in words, with the number that makes it."""
    return {
        "bubble": f"bubble of {choice.pp} stages",
        "messages": f"messages between {choice.pp * choice.vpp} pieces of the model",
        "gradients": f"sums of gradients over dp={choice.dp}",
        "optimizer": "the optimizer's pass over its state",
        "compute": "compute",
    }[part]


def _compute(choice: LayoutChoice, best: LayoutChoice, node: int) -> str:
    """Why computing takes longer than in the best layout."""
    if choice.recompute == FULL != best.recompute:
        return "forwards run again, as it does not fit without recompute=full"
    if choice.zero >= 3 > best.zero:
        return "waiting for parameters that zero=3 gathers"
    if choice.tp > node:
        return f"tensor-parallel waits: tp={choice.tp} leaves the NVLink domain"
    if choice.tp > best.tp:
        return f"tensor-parallel waits and narrower products at tp={choice.tp}"
    return "compute: a fuller slowest stage, or smaller products"


def _memory(priced: Priced, index: int) -> str:
    return "; memory is tight" if bool(priced.tight[index]) else ""
