"""Steps the parameters of one rank by a `torch.optim.Optimizer` of a script's own, on flat tensors.

A rank steps flat parts of parameters, wherever a bucket or a shard ends, so the optimizer must be
element-wise: what it does to an element depends on this element, its gradients and the step alone.
A trial on small tensors shows whether it is, and which states it keeps.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.config.fields import show
from parallel3d.device.accelerator import has_values
from parallel3d.errors import UserError, first_line
from parallel3d.optim.keys import OptimConfig, TriedOptimConfig
from parallel3d.optim.optimizer import EMA, FlatGroup, Optimizer
from parallel3d.optim.thaws import Thaw, frozen_in
from parallel3d.parameters.segments import Segment
from parallel3d.private_names import DispatchMode, tree_leaves

# Makes an optimizer of parameter groups: a class, or functools.partial(torch.optim.NAdam, …).
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
KIND = "optimizer."  # begins the names of its states in a checkpoint
PROGRESS = "optimizer"  # entry of a checkpoint's `progress`
SHAPE, CUT = (4, 6), 10  # a trial's matrix, and where it is cut
STEPS, LR, DECAY, TOLERANCE = 3, 0.01, 0.1, 1e-9


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps of a parameter, found by a trial.

    Attributes:
        name: the name of the optimizer's class.
        decays: whether it has a weight decay.
        tensors: dtype by name of the states that have the parameter's shape; None stands for the
            parameter's own dtype.
        scalars: the other states by name after the trial: numbers, and tensors of one element.
        depends_on_lr: whether a scalar depends on the learning rate.
    """

    name: str
    decays: bool
    tensors: dict[str, torch.dtype | None]
    scalars: dict[str, Any]
    depends_on_lr: bool

    def scalar(self, name: str, value: float) -> Any:
        """Returns a scalar state of this value, in the form of the trial's."""
        found = self.scalars[name]
        return torch.full_like(found, value) if isinstance(found, Tensor) else type(found)(value)


def try_out(make: OptimizerFactory, device: torch.device) -> Kept:
    """Steps a matrix, its flat view, and that view in two pieces, and compares the results.

    It does so on the CPU if `device` has no values, as in a dry run.
    Raises UserError if they differ, or if the optimizer cannot step such tensors.
    """
    name = name_of(make)
    if isinstance(make, functools.partial) and "weight_decay" in make.keywords:
        value = make.keywords["weight_decay"]
        raise UserError(
            f"fit(optimizer=…) gives {name} weight_decay={value}, which is a key, because biases "
            f"and norms have none; leave it out and give optim.weight_decay={value}"
        )
    random = torch.Generator().manual_seed(0)
    device = device if has_values(device) else torch.device("cpu")
    draws = [
        torch.randn(SHAPE, generator=random, dtype=torch.float64).to(device)
        for _ in range(STEPS + 1)
    ]
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _Trial.of(make, [lambda values: values], draws)
            flat = _Trial.of(make, [torch.flatten], draws)
            pieces = [lambda v: v.flatten()[:CUT].clone(), lambda v: v.flatten()[CUT:].clone()]
            cut = _Trial.of(make, pieces, draws)
            faster = _Trial.of(make, [torch.flatten], draws, lr=2 * LR)
        except Exception as error:
            raise UserError(
                f"fit(optimizer=…): {name} cannot step flat parameters in float64 "
                f"({type(error).__name__}: {first_line(error)}); give an element-wise optimizer, "
                "such as torch.optim.NAdam"
            ) from error
    for other, why in ((whole, "the shape of a parameter"), (cut, "more than one element")):
        if not flat.agrees(other):
            raise UserError(
                f"fit(optimizer=…): {name} is not element-wise, because its step reads {why}, of "
                "which a rank holds flat parts; give an element-wise optimizer, such as "
                "torch.optim.NAdam, or optim=muon"
            )
    if flat.changed:
        raise UserError(
            f"fit(optimizer=…): {name} changes {', '.join(flat.changed)} of its groups in its "
            "steps, which a checkpoint would lose; give an optimizer whose state is by parameter"
        )
    tensors = {
        key: None if value.dtype is torch.float64 else value.dtype
        for key, value in flat.tensors.items()
    }
    return Kept(name, flat.decays, tensors, flat.scalars, flat.scalars != faster.scalars)


def name_of(make: OptimizerFactory) -> str:
    """Returns the name of the optimizer that a factory makes."""
    made = make.func if isinstance(make, functools.partial) else make
    return getattr(made, "__qualname__", type(made).__name__)


@dataclass
class _Trial:
    """Values and states after the steps of a trial, flat; `changed`: settings that steps changed.

    Raises ValueError if the parts have different scalars, or states of another shape.
    """

    values: Tensor
    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    decays: bool
    changed: list[str]

    @classmethod
    def of(
        cls,
        make: OptimizerFactory,
        parts: Sequence[Callable[[Tensor], Tensor]],
        draws: Sequence[Tensor],
        lr: float = LR,
    ) -> _Trial:
        first, *grads = draws
        params = [nn.Parameter(part(first).clone()) for part in parts]
        made = make([{"params": params}])
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"it makes a {type(made).__name__}, not a torch.optim.Optimizer")
        decays = "weight_decay" in made.defaults
        if "lr" not in made.defaults:
            raise TypeError("it has no lr, which the schedule sets")
        (group,) = made.param_groups
        group |= {"lr": lr} | ({"weight_decay": DECAY} if decays else {})
        before = {key: value for key, value in group.items() if key != "params"}
        for grad in grads:
            for param, part in zip(params, parts, strict=True):
                param.grad = part(grad).clone()
            made.step()
        tensors: dict[str, list[Tensor]] = {}
        scalars: list[dict[str, Any]] = []
        for param in params:
            scalars.append({})
            for key, value in made.state[param].items():
                if isinstance(value, Tensor) and value.shape == param.shape:
                    tensors.setdefault(key, []).append(value.detach().flatten())
                elif isinstance(value, (bool, int, float)) or (
                    isinstance(value, Tensor) and value.numel() == 1
                ):
                    scalars[-1][key] = value
                elif value is not None:
                    what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise ValueError(f"its state {key} is {what} for a parameter {param.shape}")
        if any(other != scalars[0] for other in scalars[1:]):
            raise ValueError("its counters depend on the values of a parameter")
        values = torch.cat([param.detach().flatten() for param in params])
        changed = [key for key, value in before.items() if group[key] != value]
        whole = {key: torch.cat(each) for key, each in tensors.items()}
        return cls(values, whole, scalars[0], decays, changed)

    def agrees(self, other: _Trial) -> bool:
        """Returns whether values and states are equal but for rounding."""
        if self.tensors.keys() != other.tensors.keys() or self.scalars != other.scalars:
            return False
        pairs = [(self.values, other.values)]
        pairs += [(value, other.tensors[key]) for key, value in self.tensors.items()]
        return all(
            torch.allclose(a.double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE) for a, b in pairs
        )


def check_settings(found: Kept, optim: OptimConfig) -> None:
    """Raises UserError if the keys ask what this optimizer cannot do."""
    name = found.name
    if optim.weight_decay and not found.decays:
        raise UserError(
            f"optim.weight_decay={optim.weight_decay:g} must be 0 for {name}, which has no "
            "weight decay; the nearest is optim.weight_decay=0"
        )
    if optim.state != "fp32":
        raise UserError(
            f"optim.state={optim.state} must be fp32 for a script's own optimizer, {name}; the "
            "nearest is optim.state=fp32"
        )
    factors = [group.get("lr_mult", 1.0) for group in (optim.groups or {}).values()]
    if found.depends_on_lr and any(factor != 1 for factor in factors):
        raise UserError(
            f"optim.groups has an lr_mult, but counters of {name} depend on the learning rate, "
            "so they must be equal for all parameters; leave lr_mult out"
        )


def tried(optim: OptimConfig, make: OptimizerFactory) -> TriedOptimConfig:
    """Returns the section with what the optimizer of a script keeps and needs in a step.

    Raises UserError as `OwnOptimizer` does.
    """
    found = try_out(make, torch.device("cpu"))
    check_settings(found, optim)
    kept = tuple(None if dtype is None else dtype.itemsize for dtype in found.tensors.values())
    one, two = (temporary_elements(make, parts, found.decays) for parts in (1, 2))
    return TriedOptimConfig(**vars(optim), kept=kept, temporary=one, carried=two - one)


def temporary_elements(make: OptimizerFactory, parts: int, decays: bool) -> float:
    """Returns the most temporary elements of a step of equal parts, by elements of one of them."""
    size = 1 << 12  # scalars and counters are too small to matter beside it
    params = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for _ in range(parts)]
    made = make([{"params": params} | ({"weight_decay": DECAY} if decays else {})])
    _by_parameter(made)
    counted = _Temporaries()
    for param in params:
        param.grad = torch.ones_like(param)
    made.step()  # which makes the states
    with counted:
        made.step()
    return counted.most / params[0].nbytes


class _Temporaries(DispatchMode):
    """Counts the bytes of the tensors that operators make and nobody frees yet."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.live: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is(t)}
        out = operator(*args, **(kwargs or {}))
        for tensor in filter(_is, tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.live[id(tensor)] = weakref.ref(tensor), storage.nbytes()
        self.live = {key: each for key, each in self.live.items() if each[0]() is not None}
        self.most = max(self.most, sum(nbytes for _, nbytes in self.live.values()))
        return out


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _by_parameter(made: torch.optim.Optimizer) -> None:
    """Makes an optimizer step one flat part after another, unless the script gave `foreach`.

    On a GPU, PyTorch's classes would step all of them at once, with temporary tensors as large as
    the masters. A part is long enough for a kernel of its own.
    """
    for group in made.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = False


class OwnOptimizer(Optimizer):
    """Steps the segments by an optimizer of a script's own.

    The schedule sets the learning rate of each group, and the keys its weight decay. The states are
    the optimizer's own tensors; `FlatGroup.state` has them by the names that a checkpoint gives
    them. A parameter of one element, a witness, is stepped too: its scalar states are those of all
    parameters, also on a rank that trains none.

    Raises UserError if the optimizer is not element-wise, or does not fit the keys.
    """

    def __init__(
        self,
        make: OptimizerFactory,
        optim: OptimConfig,
        segments: list[Segment],
        seed: int,
        device: torch.device,
    ) -> None:
        self.make, self.found = make, try_out(make, device)
        check_settings(self.found, optim)
        self._device = device
        super().__init__(optim, segments, seed)

    @property
    def kept(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(KIND + key for key in self.found.tensors),)

    def progress(self) -> dict[str, Any]:
        """Returns the entry of a checkpoint: the optimizer's name and its scalar states."""
        there = self._made.state.get(self._witness, {})
        scalars = {key: float(there[key]) for key in self.found.scalars if key in there}
        return {PROGRESS: {"name": self.found.name, "scalars": scalars}}

    def refusal(self, progress: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
        """Returns why this optimizer cannot go on from a checkpoint, or None if it can.

        Counters are the same for all parameters, so none may be trained later than the others.
        """
        before, now = frozen_in(config), tuple(self.optim.freeze or ())
        if before != now:
            return (
                f"optim.freeze={show([*now])} must stay {show([*before])} with a script's own "
                f"optimizer, {self.found.name}; give init_from={config.get('run')} and another run="
            )
        there = progress.get(PROGRESS, {})
        if there.get("name") == self.found.name and (
            not progress["updates"] or there["scalars"].keys() == self.found.scalars.keys()
        ):
            return None
        return (
            f"fit(optimizer=…) gives {self.found.name}, but the checkpoint has the state of "
            f"{there.get('name', 'another optimizer')}; give that one, or choose another run="
        )

    def restore(
        self,
        updates: int,
        thaws: Sequence[Thaw] = (),
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        """Sets the numbers of updates and the scalar states; as for other optimizers otherwise.

        Before the first update the optimizer makes its own states.
        """
        self.updates, self.thaws = updates, tuple(thaws)
        self.stepped = self.trained
        self._begin()
        if updates == 0:
            return
        assert progress is not None  # the checkpoint of an update has it
        scalars = progress[PROGRESS]["scalars"]

        def counters() -> dict[str, Any]:
            return {key: self.found.scalar(key, scalars[key]) for key in self.found.scalars}

        self._made.state[self._witness] = counters()
        for key in self.found.tensors:
            self._made.state[self._witness][key] = torch.zeros_like(self._witness)
        for group, params in zip(self.trained, self._params, strict=True):
            for i, param in enumerate(params):
                kept = {key: group.state[KIND + key][i] for key in self.found.tensors}
                self._made.state[param] = counters() | kept

    def _begin(self) -> None:
        """Makes the optimizer, without states, and room for the states of a checkpoint."""
        self._params = [
            [nn.Parameter(master.detach()) for master in group.masters] for group in self.trained
        ]
        self._witness = nn.Parameter(
            torch.zeros(1, dtype=self._dtype, device=self._device), requires_grad=True
        )
        self._witness.grad = torch.ones_like(self._witness)
        groups: list[dict[str, Any]] = [{"params": [self._witness], **self._decay(0.0)}]
        for group, params in zip(self.trained, self._params, strict=True):
            groups.append({"params": params, **self._decay(group.weight_decay)})
            for key, dtype in self.found.tensors.items():
                if KIND + key not in group.state:
                    group.state[KIND + key] = [
                        torch.zeros_like(master, dtype=dtype) for master in group.masters
                    ]
        self._made = self.make(groups)
        _by_parameter(self._made)

    @property
    def _dtype(self) -> torch.dtype:
        return self.segments[0].master.dtype if self.segments else torch.float32

    def _decay(self, weight_decay: float) -> dict[str, float]:
        return {"weight_decay": weight_decay} if self.found.decays else {}

    def _divisor(self, factor: float) -> Tensor | None:
        return None  # the gradients are multiplied by the factor

    def _update(self, learning_rate: float, divisor: Tensor | None) -> None:
        """Steps all groups by the optimizer."""
        first, *rest = self._made.param_groups
        _set_rate(first, learning_rate)
        for held, group in zip(rest, self.trained, strict=True):
            _set_rate(held, learning_rate * group.treated.lr_mult)
        for group, params in zip(self.trained, self._params, strict=True):
            for param, grad in zip(params, group.grads, strict=True):
                param.grad = grad
            if self.updates == 0:  # room for a checkpoint's states, which the optimizer now makes
                self._drop(group)
        self._made.step()
        if self.updates == 0:
            for group, params in zip(self.trained, self._params, strict=True):
                for key in self.found.tensors:
                    group.state[KIND + key] = [self._made.state[p][key] for p in params]

    @staticmethod
    def _drop(group: FlatGroup) -> None:
        group.state = {name: kept for name, kept in group.state.items() if name == EMA}


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
