"""Compares pipelines of plain modules with one process that takes micro-batches one by one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d as p3d
from parallel3d.schedules.schedule import NAMED_SCHEDULES

MICROBATCHES = 6
TOLERANCE = 1e-9  # fp64


class Fork(nn.Module):
    """Takes a tensor and returns two of other shapes; one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(2).transpose(1, 2)
        y = self.both(F.gelu(self.both(x)))
        return y, x.mean(1)


class Meet(nn.Module):
    """Takes two tensors and returns one; has an embedding that is also a head, and an unused
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.LayerNorm(12), nn.Embedding(5, 12)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, y: Tensor, mean: Tensor) -> Tensor:
        x = self.norm(y + mean.unsqueeze(1)).mean(1) + self.table(torch.tensor([1]))
        return x @ self.table.weight.t() + F.linear(x, self.table.weight)


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def modules() -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        Half(),  # without parameters, its backward has nothing to do
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()),
        nn.Conv2d(8, 12, (3, 1), padding="same", bias=False),
        nn.Conv2d(12, 12, 3, padding=(1, 1), groups=3),
        Fork(),
        Meet(),
        nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4)),
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(step)
    images = torch.randn(2 * MICROBATCHES, 3, 8, 8, generator=stream, dtype=torch.float64)
    return images, torch.randint(4, (2 * MICROBATCHES,), generator=stream)


def alone(replicas: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses of three steps and the state after them; for replicas, the mean of their
    gradients."""
    net = nn.Sequential(*modules()).double()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        total = 0.0
        for replica in range(replicas):
            images, labels = batch(step * replicas + replica)
            for x, y in zip(images.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
                for module in net:
                    x = module(*x) if isinstance(x, tuple) else module(x)
                loss = F.cross_entropy(x, y) / (MICROBATCHES * replicas)
                loss.backward()
                total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, net.state_dict()


def trained(pipe: p3d.Pipeline, replica: int = 0, replicas: int = 1) -> tuple[list[float], dict]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        images, labels = batch(step * replicas + replica)
        loss = pipe.step(images if pipe.is_first else None, labels if pipe.is_last else None)
        optimizer.step()
        losses.append(loss.item())
    return losses, pipe.state_dict()


def agrees(got: tuple[list[float], dict], wanted: tuple[list[float], dict], what: str) -> None:
    assert got[0] == pytest.approx(wanted[0], abs=TOLERANCE), what
    assert list(got[1]) == list(wanted[1])
    for name, value in wanted[1].items():
        torch.testing.assert_close(
            got[1][name], value, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def every_schedule(ranks: int) -> None:
    groups, wanted = p3d.init(pp=ranks), alone()
    for schedule in NAMED_SCHEDULES:
        # The network carries the same messages: a plain schedule, and one with all kinds of
        # actions, suffice.
        for shared_memory in (True, False) if schedule in ("1f1b", "zbv") else (True,):
            pipe = p3d.Pipeline(
                [m.double() for m in modules()],
                groups.pp,
                loss_fn=F.cross_entropy,
                schedule=schedule,
                num_microbatches=MICROBATCHES,
                shared_memory=shared_memory,
            )
            agrees(trained(pipe), wanted, f"{schedule} {shared_memory=}")
            assert not pipe.executor.deferred and not pipe.executor.live


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_schedule_trains_like_one_process(ranks: int, pool) -> None:
    pool.run(ranks, every_schedule, ranks)


def replicas_and_shapes() -> None:
    """Tests pp=2 × dp=2; then batches of other sizes, evaluation, outputs, and a loaded state."""
    groups = p3d.init(pp=2)
    torch.manual_seed(dist.get_rank())
    made = [m.double() for m in modules()]
    if groups.dp.index == 1:
        made[7][0].weight.data.add_(1.0)  # replicas start like the first one
    pipe = p3d.Pipeline(
        made,
        groups.pp,
        loss_fn=F.cross_entropy,
        schedule="zb_h1",
        num_microbatches=MICROBATCHES,
        split=(3, 5),
        dp=groups.dp,
    )
    losses, state = trained(pipe, groups.dp.index, replicas=2)
    wanted, last = alone(replicas=2)
    both = [torch.tensor(losses, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(both, both[0].clone(), group=groups.dp.handle)
    mean = (sum(both) / 2).tolist()
    state, last = ({k: v for k, v in s.items() if "2.0." not in k} for s in (state, last))
    agrees((mean, state), (wanted, last), "two replicas")

    fresh = p3d.Pipeline([m.double() for m in modules()], groups.pp, num_microbatches=3)
    whole = pipe.state_dict()
    fresh.load_state_dict(whole)
    assert all(torch.equal(value, whole[name]) for name, value in fresh.state_dict().items())
    net = nn.ModuleList(modules()).double().eval()
    net.load_state_dict(whole)
    fresh.eval()
    random = torch.get_rng_state()
    for samples in (3, 6, 3):
        x = batch(9)[0][:samples]
        out, wanted = fresh(x), x
        for module in net:
            wanted = module(*wanted) if isinstance(wanted, tuple) else module(wanted)
        if fresh.is_last:
            torch.testing.assert_close(out, wanted, rtol=0, atol=TOLERANCE)
        else:
            assert out is None
    assert len(fresh.connections) == 2  # one message buffer for each shape
    assert torch.equal(torch.get_rng_state(), random)
    pipe.eval()
    evaluated = pipe.evaluate(*batch(9))
    images, labels = batch(9)
    for module in net:
        images = module(*images) if isinstance(images, tuple) else module(images)
    assert abs(evaluated.item() - F.cross_entropy(images, labels).item()) < TOLERANCE


def test_replicas_average_and_state_dicts_hold_all_modules(pool) -> None:
    pool.run(4, replicas_and_shapes)


class Odd(nn.Module):
    """Works, except as `how` says for the micro-batch whose inputs are sevens."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not bool((x == 7).any()):
            return y
        if self.how == "raises":
            raise ValueError("seven")
        if self.how == "backward":
            y.register_hook(lambda grad: grad.unknown)
        return y[:, :3] if self.how == "shape" else y


class Sevens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x == 5, 7.0)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def batch_of(*fives: int, samples: int = 8) -> Tensor:
    x = torch.zeros(samples, 4)
    x[list(fives)] = 5.0
    return x


GOOD = torch.zeros(8, dtype=torch.int64)
STEPS = (  # misbehaviour of stage 1, inputs, targets, the ranks that raise, their errors
    ("", batch_of(samples=7), GOOD, "inputs with 7 samples must be tensors of a length that num_"),
    ("", [batch_of(samples=2)] * 3 + [batch_of(samples=1)], GOOD, "micro-batch 3 of inputs has"),
    ("", [batch_of()] * 3, GOOD, "inputs is a list of 3 micro-batches, which must be num_microb"),
    ("", batch_of(), None, "targets with 0 samples must be tensors of a length that"),
    ("shape", batch_of(5), GOOD, "stage 1 returned torch.float32[2, 3] for micro-batch 2, but"),
    ("raises", batch_of(3), GOOD, "stage 1 in the forward of micro-batch 1 raised ValueError: s"),
    ("backward", batch_of(7), GOOD, "stage 1 in the backward of micro-batch 3 raised Attribute"),
    ("", batch_of(), GOOD + 9, "stage 2 in the forward of micro-batch 0 raised IndexError: "),
)
MAKES = (
    (dict(split=(1, 1)), {}, "Pipeline(split=[1, 1]) must give each of 3 stages at least one of"),
    (dict(schedule="1f2b"), {}, "schedule=1f2b is not known: choose one of gpipe, 1f1b, "),
    (dict(vpp=2), {}, "schedule=1f1b has one chunk per rank, so vpp=2 does not fit it; "),
    (dict(schedule="zbv"), {}, "the pipeline's 4 modules must be at least as many as its 6 stag"),
    (dict(num_microbatches=0), {}, "Pipeline(num_microbatches=0) must be a whole number from 1"),
    (
        dict(),
        dict(schedule="gpipe"),
        "Pipeline(schedule='gpipe') on rank 1 must be schedule='1f1b', as",
    ),
)


def said_by(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bad_input() -> tuple[list[str], list[str]]:
    rank, pp = dist.get_rank(), p3d.init(pp=3).pp
    made, steps = [], []
    shared = Odd()
    for one, other, _ in MAKES:
        words = {"num_microbatches": 4} | one | (other if rank == 1 else {})
        made.append(
            said_by(p3d.Pipeline, [Sevens(), Odd(), nn.ReLU(), nn.Linear(4, 2)], pp, **words)
        )
    made.append(said_by(p3d.Pipeline, [Sevens(), shared, shared, nn.ReLU()], pp, split=(1, 1, 2)))
    wrong = p3d.Pipeline([Sevens(), nn.Flatten(), nn.Linear(4, 2)], pp, num_microbatches=4)
    made.append(said_by(wrong.step, batch_of().long()))
    made.append(said_by(wrong.step, batch_of()))
    for schedule in ("1f1b", "zb_h1"):
        odd = Odd()
        pipe = p3d.Pipeline(
            [Sevens(), odd, nn.Linear(4, 2)],
            pp,
            loss_fn=F.cross_entropy,
            schedule=schedule,
            num_microbatches=4,
        )
        first = pipe.step(batch_of(), GOOD)
        for how, inputs, targets, _ in STEPS:
            odd.how = how
            steps.append(said_by(pipe.step, inputs, targets))
            odd.how = ""
            assert pipe.step(batch_of(), GOOD) == first
        pipe.eval()
    return made, steps


def test_impossible_input_is_refused_on_every_rank_and_the_next_step_works(pool) -> None:
    results = pool.run(3, bad_input)
    wanted = [sentence for *_, sentence in MAKES] + [
        "2.linear.weight is the same parameter as 1.linear.weight, but lies on another rank",
        "stage 0 of the pipeline must return a tensor or a tuple of them of one floating-point",
        "the pipeline's loss must be one number for each micro-batch, not (2, 2); give a loss_fn",
    ]
    for rank, (made, steps) in enumerate(results):
        for sentence, said in zip(wanted, made, strict=True):
            assert said.startswith(f"Parallel3dError: {sentence}"), (rank, said)
        for (how, *_, sentence), said in zip(STEPS * 2, steps, strict=True):
            if " raised " not in sentence:
                assert said.startswith(f"Parallel3dError: {sentence}"), (rank, said)
            elif rank == int(sentence[6]):
                assert not said.startswith(("RuntimeError", "nothing")), (rank, how, said)
            else:
                assert said.startswith(f"RuntimeError: rank {sentence[6]}: {sentence}"), said


def one_replica_fails() -> list[str]:
    groups = p3d.init()
    bad = dist.get_rank() == 1
    odd = Odd("raises" if bad else "")
    modules = [Sevens(), odd, Mean()]
    pipe = p3d.Pipeline(modules, groups.pp, num_microbatches=2, dp=groups.dp)
    said = []
    for inputs in (batch_of(samples=3 if bad else 4), batch_of(0, samples=4), batch_of(samples=4)):
        said.append(said_by(pipe.step, inputs))
    return said


def test_if_a_replica_fails_no_other_waits_for_ever(pool) -> None:
    other = "RuntimeError: another replica of the pipeline failed in this step"
    good, bad = pool.run(2, one_replica_fails)
    assert good == [other, other, "nothing"]
    assert bad[0].startswith("Parallel3dError: inputs with 3 samples")
    assert bad[1:] == ["ValueError: seven", "nothing"]
