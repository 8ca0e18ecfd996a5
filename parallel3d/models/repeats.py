"""Says which parts of a layer its backward repeats: the words of the key `recompute`.

| part of a layer | no longer kept by the layer | repeated in the backward |
|---|---|---|
| norm | the results of both norms | both norms, from the residual stream |
| activation | the input of `down` | the non-linearity, from the result of `up` |
| attention | everything between `qkv` and `out` | attention, from the result of `qkv` |
| mlp | the result of `up`, the input of `down` | both, from the result of the norm |
| layer | everything but its input | the layer, up to the input of its last GEMM |

`none` means no part, `selective` attention, and `full` the whole layer. Another mixer is repeated
like attention, between its first projection and its last. With norm and mlp the MLP is repeated
from the residual stream. `recompute_layers` limits repetition to the first layers of a stage. The
limit may differ by stage, because early stages hold the activations of most micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel3d.config.values import words_of

PARTS = ("norm", "activation", "attention", "mlp", "layer")
WORDS: dict[str, tuple[str, ...]] = {"none": (), "selective": ("attention",), "full": ("layer",)}
_IMPLIED = {"mlp": ("activation",), "layer": PARTS[:-1]}


def parts_of(recompute: str | Sequence[str]) -> frozenset[str]:
    """Returns the recomputed parts, without those that other parts include."""
    is_word = isinstance(recompute, str) and recompute in WORDS
    return _least(WORDS[str(recompute)] if is_word else words_of(recompute))


@functools.lru_cache(maxsize=256)
def _least(parts: tuple[str, ...]) -> frozenset[str]:
    return frozenset(parts).difference(*(_IMPLIED.get(part, ()) for part in parts))


def spelled(recompute: str | Sequence[str]) -> str:
    """Returns `recompute` as text: a word such as "full" if it means the same, or else the parts.

    The parts are in the order of PARTS.
    """
    least = tuple(sorted(parts_of(recompute), key=PARTS.index))
    return next((word for word, means in WORDS.items() if means == least), f"[{','.join(least)}]")


@dataclass(frozen=True)
class Repeats:
    """The parts that a layer repeats; a part that another one includes is false."""

    norm: bool = False
    activation: bool = False
    attention: bool = False
    mlp: bool = False
    layer: bool = False

    @classmethod
    def of(cls, recompute: str | Sequence[str]) -> Repeats:
        """Returns the parts that a value of the key lists."""
        return cls(**dict.fromkeys(parts_of(recompute), True))

    def __bool__(self) -> bool:
        return any(getattr(self, part) for part in PARTS)

    @property
    def parts(self) -> frozenset[str]:
        """The names of the parts."""
        return frozenset(part for part in PARTS if getattr(self, part))

    @property
    def mixer(self) -> bool:
        """Whether attention runs again, by itself or with the whole layer."""
        return self.attention or self.layer

    @property
    def mlp_with_norm(self) -> bool:
        """Whether an MLP is repeated from the residual stream."""
        return self.mlp and self.norm

    @property
    def without_norms(self) -> Repeats:
        """The parts of a layer whose norms follow attention and MLP.

        Repeating these norms would save nothing, because other operations keep their inputs and
        results anyway.
        """
        return replace(self, norm=False)

    @property
    def inside_mlp(self) -> Repeats:
        """The parts of an MLP inside a module that repeats its norm, or all of its forward, itself.

        In the second case the MLP has `layer` instead, so that its linear layers let a repetition
        that ends with them stop before the last GEMM.
        """
        return replace(self, norm=False, mlp=False, layer=self.layer or self.mlp)


NOTHING = Repeats()
