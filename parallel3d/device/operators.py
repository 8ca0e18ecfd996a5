"""Operators that a compiler takes as they are, without looking into them."""

from __future__ import annotations

from collections.abc import Callable

import torch

_library = torch.library.Library("parallel3d", "FRAGMENT")


def define(name: str, signature: str, run: Callable, shape: Callable) -> None:
    """`torch.ops.parallel3d.NAME`.

    Args:
        signature: of arguments and results, as torch's schemas are written.
        run: computes it, on any device.
        shape: results like those of `run` in shape and type, from arguments without values.
    """
    _library.define(f"{name}{signature}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"parallel3d::{name}", shape, lib=_library)


def differentiate(name: str, backward: Callable, remember: Callable) -> None:
    """Gives a defined operator its gradient, as `torch.library.register_autograd` does."""
    torch.library.register_autograd(
        f"parallel3d::{name}", backward, setup_context=remember, lib=_library
    )
