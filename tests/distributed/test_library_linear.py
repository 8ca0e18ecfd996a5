"""Compares the tensor-parallel layers with `nn.Linear` and `nn.Embedding`, of the same seed."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel3d as p3d

pytestmark = pytest.mark.nightly

TOLERANCE = 1e-12  # in fp64, where sums are in another order
BAD = (
    (lambda: p3d.ColumnParallelLinear(6, 9), "(out_features=9) must be a multiple of the 4 "),
    (lambda: p3d.RowParallelLinear(6, 8), "(in_features=6) must be a multiple of the 4 ranks"),
    (lambda: p3d.VocabParallelEmbedding(0, 8), "(num_embeddings=0) must be a multiple of the 4"),
    (lambda: p3d.ColumnParallelLinear(8, 8, seed=1), "(seed=1) must have a name as well"),
    (lambda: p3d.RowParallelLinear(8, 8)(torch.zeros(3, 8)), "got 8 features, but must get this"),
    (lambda: p3d.VocabParallelEmbedding(8, 2)(torch.tensor([3, 8])), "id 8 must be in 0 … 7"),
    (lambda: p3d.RowParallelLinear(8, 8, "tp"), "group='tp' must be a group that this rank is in"),
    (lambda: p3d.ColumnParallelLinear(8, {"q": 8, "k": 6}), "(out_features[k]=6) must be a mult"),
    (
        lambda: p3d.ColumnParallelLinear(8, {"q": 8, "k": 3}, tp_replicas={"k": 3}),
        "(tp_replicas[k]=3) must divide the 4 ranks of the group; the nearest is 2",
    ),
    (
        lambda: p3d.ColumnParallelLinear(8, {"q": 8, "k": 8}, gather_output=True),
        "(gather_output=True) must have one matrix, not q, k",
    ),
    (
        lambda: p3d.RowParallelLinear(8, 8, sequence_parallel=True)(torch.zeros(1, 6, 2)),
        "an input of shape (1, 6, 2), but with sequence_parallel=True it must have 3 dimensions",
    ),
)


class Net(nn.Module):
    """Has an embedding, an MLP and a head: tensor-parallel layers if a group is given, else
    PyTorch's."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        if group is None:
            self.words, self.up = nn.Embedding(16, 6), nn.Linear(6, 8)
            self.down, self.head = nn.Linear(8, 6, bias=False), nn.Linear(6, 4)
            self.last = nn.Linear(4, 3)
        else:
            self.words = p3d.VocabParallelEmbedding(16, 6, group)
            self.up = p3d.ColumnParallelLinear(6, 8, group)
            self.down = p3d.RowParallelLinear(8, 6, group, bias=False)
            self.head = p3d.ColumnParallelLinear(6, 4, group, gather_output=True)
            self.last = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        return self.last(self.head(x + self.down(F.gelu(self.up(x)))))


def trained(net: nn.Module, autocast: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns losses of three steps, and the weights after them."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.05), []
    ids = torch.arange(24).view(2, 3, 4) * 5 % 16
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=autocast):
            loss = net(ids).square().sum(-1).sub(1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def make(group: Any = None, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    torch.set_default_dtype(dtype)
    try:
        return Net(group)
    finally:
        torch.set_default_dtype(torch.float32)


def beside_pytorch() -> None:
    """Compares first weights, losses, last weights and the result of loading on every rank with
    PyTorch's, for groups of 1, 2 and 4."""
    theirs = make()
    first = {name: value.clone() for name, value in theirs.state_dict().items()}
    losses, last = trained(theirs)
    in_bf16 = trained(make(dtype=torch.float32), autocast=True)[0]
    drawn_before = torch.empty(0)
    for tp in (1, 2, 4):
        group = p3d.init(tp=tp).tp
        net = make(group)
        assert sum(p.numel() for p in net.up.parameters()) == (6 * 8 + 8) / tp
        twin, whole = copy.deepcopy(net), net.state_dict()
        assert list(whole) == list(first)
        assert all(torch.equal(whole[name], value) for name, value in first.items())
        for one in (net, twin):
            got, whole = trained(one)
            assert got == pytest.approx(losses, abs=TOLERANCE)
            for name, value in last.items():
                torch.testing.assert_close(whole[name], value, rtol=0, atol=TOLERANCE)
        for assign in (False, True):
            fresh = make(group)
            fresh.load_state_dict(last, assign=assign)
            assert all(torch.equal(v, last[k]) for k, v in fresh.state_dict().items())
        assert trained(make(group, torch.float32), autocast=True)[0] == pytest.approx(
            in_bf16, rel=2e-2
        )
        drawn = p3d.RowParallelLinear(8, 300, group, seed=3, name="mlp.down").state_dict()
        assert not drawn["bias"].any()
        assert 0.018 < float(drawn["weight"].std()) < 0.022
        drawn_before = drawn["weight"] if tp == 1 else drawn_before
        assert torch.equal(drawn["weight"], drawn_before)


def of_layers_that_are_there() -> None:
    """Replaces every layer of a PyTorch network by its shard, and trains the same."""
    losses, last = trained(make())
    for tp in (2, 4):
        group, net = p3d.init(tp=tp).tp, make()
        net.down.weight.requires_grad_(False)
        net.eval()
        before = torch.get_rng_state()
        net.words = p3d.VocabParallelEmbedding.from_embedding(net.words, group)
        net.up = p3d.ColumnParallelLinear.from_linear(net.up, group)
        net.down = p3d.RowParallelLinear.from_linear(net.down, group)
        net.head = p3d.ColumnParallelLinear.from_linear(net.head, group, gather_output=True)
        assert torch.equal(torch.get_rng_state(), before)
        assert net.up.weight.shape == (8 / tp, 6)
        assert not net.down.weight.requires_grad
        assert not net.down.training
        net.down.weight.requires_grad_(True)
        got, whole = trained(net)
        assert got == pytest.approx(losses, abs=TOLERANCE)
        for name, value in last.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "given", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_a_table_that_cannot_be_split_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(p3d.Parallel3dError, match=next(iter(given))):
        p3d.VocabParallelEmbedding.from_embedding(nn.Embedding(8, 2, **given))


class Grouped(nn.Module):
    """Has an embedding, a norm, eight queries with two keys and values in one GEMM, and a head.

    If a group is given, they are split along the sequence; among four ranks, two share each
    key-value head.
    """

    def __init__(self, group: Any = None, replicated: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        if group is None:
            self.words, self.qkv = nn.Embedding(16, 6), nn.Linear(6, 12)
            self.down, self.head = nn.Linear(8, 6), nn.Linear(6, 4)
        else:
            rest = {"group": group, "sequence_parallel": True}
            self.words = p3d.VocabParallelEmbedding(16, 6, replicated=replicated, **rest)
            shared = dict.fromkeys(("k", "v"), max(1, group.size // 2))
            rows = {"q": 8, "k": 2, "v": 2}
            self.qkv = p3d.ColumnParallelLinear(6, rows, tp_replicas=shared, **rest)
            self.down = p3d.RowParallelLinear(8, 6, **rest)
            self.head = p3d.ColumnParallelLinear(6, 4, gather_output=True, **rest)
            p3d.sum_gradients_over(self.norm, group)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        q, k, v = self.qkv(self.norm(x)).split(getattr(self.qkv, "sizes", [8, 2, 2]), -1)
        heads = torch.sigmoid(q.unflatten(-1, (k.shape[-1], -1)) * k.unsqueeze(-1))
        return self.head(x + self.down((heads * v.unsqueeze(-1)).flatten(-2)))


def grouped(*more: Any) -> nn.Module:
    torch.manual_seed(11)
    with torch.device("cpu"):
        return Grouped(*more).double()


def along_the_sequence() -> None:
    """Compares losses, and weights after three steps, on every rank with PyTorch's, for groups of
    1, 2 and 4."""
    theirs = grouped()
    first = {name: value.clone() for name, value in theirs.state_dict().items()}
    ids = torch.arange(24).view(3, 8) * 5 % 16

    def train(net: nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.05), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(ids).square().sum(-1).sub(1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, net.state_dict()

    losses, last = train(theirs)
    for tp in (1, 2, 4):
        group = p3d.init(tp=tp).tp
        for replicated in (False, True):
            net = grouped(group, replicated)
            assert net.words(ids).shape == (3, 8 / tp, 6)
            assert net.qkv.sizes == [8 / tp, max(1, 2 / tp), max(1, 2 / tp)]
            whole = net.state_dict()
            assert all(torch.equal(whole[name], value) for name, value in first.items())
            copied = copy.deepcopy(net)
            got, whole = train(net)
            assert got == pytest.approx(losses, abs=TOLERANCE)
            for name, value in last.items():
                torch.testing.assert_close(whole[name], value, rtol=0, atol=TOLERANCE)
            copied.load_state_dict(last)
            whole = copied.state_dict()
            assert all(torch.equal(whole[name], value) for name, value in last.items())


def refused() -> list[str]:
    said = []
    for call, _ in BAD:
        try:
            call()
        except (p3d.Parallel3dError, IndexError) as error:
            said.append(str(error))
    wrong = {"weight": torch.zeros(4, 2), "bias": torch.zeros(8)}
    try:
        p3d.RowParallelLinear(8, 8).load_state_dict(wrong)
    except RuntimeError as error:
        said.append(str(error))
    return said


def nets_and_refusals() -> list[str]:
    """Runs layers of the same seed, existing layers, and layers along the sequence, in one run for
    all tests."""
    beside_pytorch()
    of_layers_that_are_there()
    along_the_sequence()
    return refused()


def test_layers_train_like_pytorchs_and_impossible_splits_are_refused_on_every_rank(pool) -> None:
    for said in pool.run(4, nets_and_refusals):
        for (_, wanted), sentence in zip(BAD, said[:-1], strict=True):
            assert wanted in sentence
        assert "weight has shape (4, 2), but must have that of the whole tensor, (8, 8)" in said[-1]


def alone() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(2)
    layers = p3d.ColumnParallelLinear(6, 8), nn.GELU(), p3d.RowParallelLinear(8, 6)
    return nn.Sequential(*layers), torch.randn(3, 6)


def test_a_net_is_pickled_after_a_backward_and_its_parameters_load_as_weights_only() -> None:
    net, x = alone()
    net(x).sum().backward()
    again = pickle.loads(pickle.dumps(net))
    again.zero_grad()
    again(x).sum().backward()
    for copied, parameter in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(copied, parameter) and torch.equal(copied.grad, parameter.grad)
    saved = io.BytesIO()
    torch.save(list(net.parameters()), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(loaded, net.parameters(), strict=True))


def compiled() -> None:
    """Compares the kernels here, in a process that has imported the compiler."""
    net, x = alone()
    net(x).sum().backward()
    eager = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    heard: list[torch.Tensor] = []
    for parameter in net.parameters():
        parameter.register_hook(heard.append)
    torch.compile(net, backend="aot_eager")(x).sum().backward()
    assert len(heard) == 4
    for parameter, grad in zip(net.parameters(), eager, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_a_compiled_net_has_the_same_gradients(pool) -> None:
    """A user's network has no operators of compiled blocks, whose gradients bypass autograd."""
    pool.run(1, compiled)


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 3, 2, 6)])
def test_layers_take_inputs_of_any_dimensions(shape: tuple[int, ...]) -> None:
    """Tests a single rank, where a layer is PyTorch's."""
    torch.manual_seed(1)
    theirs = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    torch.manual_seed(1)
    ours = nn.Sequential(p3d.ColumnParallelLinear(6, 8), p3d.RowParallelLinear(8, 4))
    x = torch.randn(shape, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    torch.testing.assert_close(ours(x), theirs(y))
    ours(x).sum().backward()
    theirs(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
