"""Which keys of a configuration a run may change when it goes on: arithmetic on nested dicts.

Three kinds. Where and how a run computes (layout, schedule, launcher, logger, …) changes nothing
but rounding: free. What the next steps do (learning rate, batch, length, precision, …) may change
and is said. What the weights and the order of the samples are made of (model, data, seed, kind of
optimizer) is the run itself: another one needs another name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel3d.config.schema import Config

# Keys, or sections with a dot at the end. The longest that fits decides; what none fits is said.
REFUSED = ("model.", "data.", "seed", "optim.name", "optim.momentum")
FREE = (
    *("run", "runs_dir", "device", "compile", "deterministic", "placement", "rank_file", "prompt"),
    *("preflight", "layout", "tp", "pp", "dp", "cp", "sp", "vpp", "zero", "micro_batch_size"),
    *(
        "attention_kernel",
        "recompute",
        "recompute_layers",
        "train.progress",
        "train.log_every",
        "train.save_weights",
        "train.noise_scale",
        "loss.chunk_tokens",
    ),
    *("schedule.", "tensor_parallel.", "ddp.", "cluster.", "launch.", "logger.", "profile."),
    *("checkpoint.", "recovery.", "generate.", "topology.", "bench.", "calibrate.", "verify."),
    "plan.",
    # Of the model: its name, and how its tables are laid out. Of the data: the fingerprint of the
    # text decides, not where it lies.
    *("model.name", "model.vocab_multiple", "model.embedding", "model.parallel_output"),
    # The tokenizer's digest decides as well, beside the text's.
    *("model.init_std", "data.path", "data.name", "data.cache_dir", "data.tokenizer"),
    *("data.most_epochs", "data.held_out_sets", "data.block_cache_gb"),
)
# Said, though their section is refused or free: weights of a blend are, where they have been read
# by; hooks that compress gradients change them.
REPORTED = (
    *("model.dropout", "data.blend", "data.blend_stages"),
    *("ddp.comm_hook", "ddp.powersgd_rank", "ddp.powersgd_start"),
)
BRACES = ("blend", "blend_stages")  # keys whose values have names of their own
# Keys that older checkpoints do not have, with what their models and samples are.
LATER = {
    "data.packing": "concat",
    "data.document_mask": False,
    "model.head_dim": None,
    "model.qk_norm": False,
    "model.attention_bias": None,
    "model.rope_scaling_factor": 1.0,
}
LAYOUT = ("tp", "pp", "dp", "cp", "sp", "vpp", "zero", "micro_batch_size", "schedule.name")


class ConfigChange(NamedTuple):
    """A key with its value there (in the checkpoint) and here."""

    key: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.key} is {self.there!r} there, now {self.here!r}"


def changes(there: Mapping[str, Any], here: Config) -> list[ConfigChange]:
    """Every key that differs, of those that both know or that came `LATER`; `there` is a
    configuration as dicts."""
    old, new = LATER | flat(there), flat(dataclasses.asdict(here))
    common = sorted(old.keys() & new.keys())
    return [
        ConfigChange(key, old[key], new[key]) for key in common if not _same(old[key], new[key])
    ]


def refused(found: list[ConfigChange]) -> list[ConfigChange]:
    """Those with which a run cannot go on.

    Momentum may change, but not come or go: its state is there or not.
    """
    kept = [c for c in found if _kind(c.key) == "refused"]
    return [c for c in kept if c.key != "optim.momentum" or bool(c.there) != bool(c.here)]


def said(found: list[ConfigChange]) -> list[ConfigChange]:
    """Those that change what the next steps do."""
    refusals = refused(found)
    return [c for c in found if _kind(c.key) != "free" and c not in refusals]


def layout(found: list[ConfigChange]) -> list[ConfigChange]:
    """Those of the layout, which change nothing but rounding."""
    return [c for c in found if c.key in LAYOUT]


def refusal(run: str | None, found: list[ConfigChange]) -> str | None:
    """The sentence that refuses to go on, with the differing keys, or None."""
    bad = refused(found)
    if not bad:
        return None
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return (
        f"run={run} cannot go on with another configuration: "
        f"{', '.join(map(str, bad[:3]))}{more}; choose another run="
    )


def _kind(key: str) -> str:
    rules = [("refused", r) for r in REFUSED] + [("free", f) for f in FREE]
    rules += [("said", s) for s in REPORTED]
    fitting = [(len(rule), kind) for kind, rule in rules if _fits(key, rule)]
    return max(fitting)[1] if fitting else "said"


def _fits(key: str, rule: str) -> bool:
    return key.startswith(rule) if rule.endswith(".") else key == rule


def _same(a: Any, b: Any) -> bool:
    """Lists and tuples of equal items are the same: one of them came out of JSON."""
    sequences = (list, tuple)
    if isinstance(a, sequences) and isinstance(b, sequences):
        return list(a) == list(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):  # of numbers JSON makes words
        words = {str(k): v for k, v in a.items()}, {str(k): v for k, v in b.items()}
        return words[0].keys() == words[1].keys() and all(
            _same(v, words[1][k]) for k, v in words[0].items()
        )
    return a == b


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and key not in BRACES:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
