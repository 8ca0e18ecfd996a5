"""Tests private names of dependencies: each is used in only one file, and does what parallel3d
needs.

These tests also run with the newest versions, as docs/versions.md says.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import parallel3d
from parallel3d import private_names as names
from parallel3d import versions
from parallel3d.cli import overrides
from parallel3d.errors import UserError
from parallel3d.private_names import NAMES, OVERRIDDEN, SINCE, find
from parallel3d.run_config import conf_dir

ROOT = Path(parallel3d.__file__).parent
AT_HOME = ROOT / "private_names.py"

# --- What each name does ----------------------------------------------------------------------


def operators_seen() -> bool:
    seen: list[str] = []

    class Seeing(names.DispatchMode):  # type: ignore[name-defined,misc]
        def __torch_dispatch__(self, operator: Any, *given: Any) -> Any:
            seen.append(str(operator))
            _, args, kwargs = given
            return operator(*args, **kwargs)

    values = torch.ones(3)
    with Seeing():
        values.add_(values.exp())
    return seen == ["aten.exp.default", "aten.add_.Tensor"]


def arguments(operator: Any) -> list[str]:
    return [argument.name for argument in names.schema_of(operator.default).arguments]


def tensors(*values: float) -> list[Tensor]:
    return [torch.tensor([value]) for value in values]


def changed(call: Callable[..., Any], *more: Any, **named: Any) -> list[float]:
    """Returns the result of a multi-tensor function on 1 and 2 in place."""
    given = tensors(1.0, 2.0)
    call(given, *more, **named)
    return [t.item() for t in given]


def adamw() -> bool:
    parameter, grad, average, square, step = tensors(1.0, 0.5, 0.0, 0.0, 1.0)
    names.fused_adamw_(
        [parameter], [grad], [average], [square], [], [step],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=0.0, amsgrad=False, maximize=False,
    )  # fmt: skip
    return abs(parameter.item() - 0.9) < 1e-6 and abs(average.item() - 0.05) < 1e-7


def sgd() -> bool:
    parameter, grad = tensors(1.0, 0.5)
    names.fused_sgd_(
        [parameter], [grad], [],
        weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=True,
    )  # fmt: skip
    return abs(parameter.item() - 0.95) < 1e-7


def queries() -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(1)) for _ in "qkv")


def cpu_attention() -> bool:
    q, k, v = queries()
    q.requires_grad_()
    want = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out, sums = names.cpu_flash_forward(q.detach(), k, v, 0.0, True)
    grad = torch.ones_like(out)
    of_q, *_ = names.cpu_flash_backward(grad, q.detach(), k, v, out, sums, 0.0, True)
    want.backward(grad)
    return torch.allclose(out, want) and torch.allclose(of_q, q.grad)


def hooked() -> Tensor:
    parameter = nn.Parameter(torch.ones(1))
    parameter.register_hook(print)
    parameter.register_post_accumulate_grad_hook(repr)
    return parameter


def in_a_backward(what: Callable[[], Any]) -> list[Any]:
    found: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: found.append(what()))
    (2 * x).backward()
    return found


def at_the_end() -> list[str]:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)

    def queue(grad: Tensor) -> None:
        names.execution_engine.queue_callback(lambda: order.append("end"))
        order.append("hook")

    x.register_hook(queue)
    (2 * x).backward()
    return order


def version_stays() -> bool:
    x = torch.ones(1)
    before = names.version_of(x)
    with names.unsafe_preserve_version_counter((x,)):
        x.add_(1)
    return names.version_of(x) == before and x.item() == 2


def saving(what: Callable[[], Any]) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return what()


def wrapper() -> bool:
    class Wrapper(Tensor):
        __torch_function__ = names.disabled_torch_function

        @classmethod
        def __torch_dispatch__(cls, *call: Any) -> Any:
            raise NotImplementedError

    made = names.make_wrapper_subclass(
        Wrapper, torch.Size([2, 3]), strides=(3, 1), storage_offset=0, dtype=torch.float32,
        layout=torch.strided, device=torch.device("cpu"),
    )  # fmt: skip
    return made.shape == (2, 3) and type(made) is Wrapper


def sizes_of_a_wrapper_change() -> bool:
    class Wrapper(Tensor):
        __torch_function__ = names.disabled_torch_function

        @classmethod
        def __torch_dispatch__(cls, operator: Any, *call: Any) -> Any:
            (wrapped, *rest), included = call[1], names.includes_meta()
            with names.DisabledDispatch():
                names.include_meta(True)
                operator(wrapped, *rest)
                names.include_meta(included)
            return wrapped

    made = names.make_wrapper_subclass(Wrapper, torch.Size([2, 3]), device=torch.device("cpu"))
    made.transpose_(0, 1)
    return made.shape == (3, 2) and not names.includes_meta()


def same_storage() -> bool:
    x = torch.ones(4)
    one, other = (names.storage_address(t.untyped_storage()) for t in (x, x[2:]))
    return one == other != names.storage_address(torch.ones(4).untyped_storage())


def data_is_set() -> bool:
    x = torch.ones(1)
    names.TensorBase.data.__set__(x, torch.zeros(2))
    return x.tolist() == [0, 0]


def kernels_race() -> bool:
    handler = names.sanitizer.EventHandler()
    handler.tensors_accessed = names.TensorsAccessed()
    handler.tensors_accessed.accesses[7] = names.sanitizer.TensorInfo(None)

    def launch(stream: int) -> list[Any]:
        return names.handle_kernel_launch(handler, stream, set(), {7}, set(), "kernel", {7: ["x"]})

    return not launch(0) and len(launch(1)) == 1


def compiled_once() -> bool:
    named = inspect.signature(names.compile_fx).parameters
    return {"inner_compile", "config_patches"} <= set(named) and callable(names.compile_fx_inner)


def gloo_options() -> tuple[list[Any], timedelta]:
    options = names.GlooOptions()
    names.set_devices(options, [dist.ProcessGroupGloo.create_device(interface="lo")])
    names.set_timeout(options, timedelta(seconds=7))
    return ["lo"] * len(options._devices), options._timeout


def in_a_world(what: Callable[[], bool]) -> bool:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return what()
    finally:
        dist.destroy_process_group()


def a_slice_knows_its_mesh() -> bool:
    mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("a", "b"))
    return names.root_of_mesh(mesh["a"]) is mesh


def the_world_has_a_backend() -> bool:
    assert dist.group.WORLD is not None
    backend = names.backend_for(dist.group.WORLD, torch.device("cpu"))
    name = names.world_state.pg_names[dist.group.WORLD]
    return (
        backend.options._timeout > timedelta(seconds=1)
        and name == dist.group.WORLD.group_name
        and names.default_store().num_keys() > 0
    )


def reads_files_as_written() -> bool:
    """Returns whether Hydra reads files of a folder by the class in its table."""
    overrides.register()
    return names.hydra_sources.instance().resolve("file") is overrides.FileConfigSource


IN_PLACE = {
    "foreach_add_": lambda: changed(names.foreach_add_, 1) == [2, 3],
    "foreach_copy_": lambda: changed(names.foreach_copy_, tensors(5.0, 6.0)) == [5, 6],
    "foreach_div_": lambda: changed(names.foreach_div_, torch.tensor(2.0)) == [0.5, 1],
    "foreach_lerp_": lambda: changed(names.foreach_lerp_, tensors(3.0, 4.0), 0.5) == [2, 3],
    "foreach_mul_": lambda: changed(names.foreach_mul_, torch.tensor(3.0)) == [3, 6],
}
BEHAVIOUR: dict[str, Callable[[], Any]] = {
    **IN_PLACE,
    "foreach_norm": lambda: (
        [n.item() for n in names.foreach_norm(tensors(-3.0, 4.0), 2.0, dtype=torch.float64)]
        == [3, 4]
    ),
    "fused_adamw_": adamw,
    "fused_sgd_": sgd,
    "flash_forward": lambda: (
        arguments(names.flash_forward)[:10]
        == ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
            "is_causal", "return_debug_mask"]
    ),
    "flash_backward": lambda: (
        arguments(names.flash_backward)[:14]
        == ["grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k",
            "max_q", "max_k", "dropout_p", "is_causal", "rng_state", "unused"]
    ),
    "cpu_flash_forward": cpu_attention,
    "cpu_flash_backward": cpu_attention,
    "math_attention": lambda: (
        names.math_attention(*queries(), is_causal=True, scale=None)[0].shape == (1, 2, 3, 8)
    ),
    "aten_foreach_copy_": lambda: arguments(names.aten_foreach_copy_)[:2] == ["self", "src"],
    "aten_fused_sgd_": lambda: arguments(names.aten_fused_sgd_)[:2] == ["self", "grads"],
    "to_copy": lambda: {"dtype", "device", "non_blocking"} <= set(arguments(names.to_copy)),
    "local_scalar_dense": lambda: names.local_scalar_dense(torch.tensor(3)) == 3,
    "fused_gru_cell": lambda: (
        arguments(names.fused_gru_cell)[:3] == ["input_gates", "hidden_gates", "hx"]
    ),
    "fused_gru_cell_backward": lambda: (
        arguments(names.fused_gru_cell_backward) == ["grad_hy", "workspace", "has_bias"]
    ),
    "fused_lstm_cell": lambda: (
        arguments(names.fused_lstm_cell)[:3] == ["input_gates", "hidden_gates", "cx"]
    ),
    "fused_lstm_cell_backward": lambda: (
        arguments(names.fused_lstm_cell_backward)
        == ["grad_hy", "grad_cy", "cx", "cy", "workspace", "has_bias"]
    ),
    "functional_collectives": lambda: (
        arguments(names.functional_collectives.all_reduce) == ["input", "reduce_op", "group_name"]
        and arguments(names.functional_collectives.all_gather_into_tensor)
        == ["input", "group_size", "group_name"]
    ),
    "backward_hooks": lambda: (
        list(names.backward_hooks(hooked()).values()) == [print]
        and names.backward_hooks(nn.Parameter(torch.ones(1))) is None
    ),
    "post_accumulate_grad_hooks": lambda: (
        list(names.post_accumulate_grad_hooks(hooked()).values()) == [repr]
    ),
    "current_graph_task_id": lambda: (
        names.current_graph_task_id() < 0 <= in_a_backward(names.current_graph_task_id)[0]
    ),
    "top_saved_tensors_hooks": lambda: (
        names.top_saved_tensors_hooks(True) is None
        and saving(lambda: names.top_saved_tensors_hooks(True)) is not None
    ),
    "execution_engine": lambda: at_the_end() == ["hook", "end"],
    "version_of": lambda: names.version_of(torch.ones(1).add_(1).add_(1)) == 2,
    "unsafe_preserve_version_counter": version_stays,
    "DispatchMode": operators_seen,
    "storage_address": same_storage,
    "make_wrapper_subclass": wrapper,
    "disabled_torch_function": wrapper,
    "DisabledDispatch": sizes_of_a_wrapper_change,
    "includes_meta": sizes_of_a_wrapper_change,
    "include_meta": sizes_of_a_wrapper_change,
    "TensorBase": data_is_set,
    "Future": lambda: isinstance(torch.futures.Future(), names.Future),
    "is_dense": lambda: (
        names.is_dense(torch.ones(2, 3).t()) and not names.is_dense(torch.ones(4)[::2])
    ),
    "tree_leaves": lambda: names.tree_leaves({"a": [1, (2,)]}) == [1, 2],
    "tree_map_only": lambda: names.tree_map_only(int, lambda i: i + 1, ("a", [1])) == ("a", [2]),
    "local_shape_and_offset": lambda: (
        [*inspect.signature(names.local_shape_and_offset).parameters][:3]
        == ["global_shape", "mesh", "placements"]
    ),
    "abort_process_group": lambda: not [
        p for p in inspect.signature(names.abort_process_group).parameters.values()
        if p.default is p.empty
    ],
    "default_store": lambda: in_a_world(the_world_has_a_backend),
    "world_state": lambda: in_a_world(the_world_has_a_backend),
    "GlooOptions": lambda: gloo_options() == (["lo"], timedelta(seconds=7)),
    "root_of_mesh": lambda: in_a_world(a_slice_knows_its_mesh),
    "self_recording_backends": lambda: (
        names.self_recording_backends is None or "gloo" in names.self_recording_backends
    ),
    "compile_fx": compiled_once,
    "compile_fx_inner": compiled_once,
    "inductor_cache": lambda: Path(names.inductor_cache()).is_absolute(),
    "RecompileLimit": lambda: issubclass(names.RecompileLimit, Exception),
    "DynamoError": lambda: issubclass(names.DynamoError, RuntimeError),
    "has_triton": lambda: names.has_triton() in (True, False),
    "setup_python_backend": lambda: (
        [*inspect.signature(names.setup_python_backend).parameters][:2]
        == ["rename", "backend_module"]
    ),
    "sanitizer": lambda: callable(names.sanitizer.StreamSynchronizations().is_ordered_after),
    "TensorsAccessed": kernels_race,
    "handle_kernel_launch": kernels_race,
    "hydra_arguments": lambda: names.hydra_arguments().parse_args(["a=1"]).overrides == ["a=1"],
    "HydraFiles": lambda: (
        names.HydraFiles("main", f"file://{conf_dir()}").load_config("model/gpt_tiny").config.name
        == "gpt_tiny"
    ),
    "hydra_sources": reads_files_as_written,
}  # fmt: skip


def test_every_private_name_has_a_test_of_its_behaviour() -> None:
    assert set(BEHAVIOUR) == set(NAMES)
    assert set(SINCE) <= set(NAMES)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BEHAVIOUR)
def test_every_private_name_behaves_as_expected(name: str) -> None:
    assert BEHAVIOUR[name]()


def test_modules_and_operators_have_their_tables() -> None:
    norm = nn.BatchNorm1d(2)
    parameters, modules = names.tables_of(nn.Sequential(norm))
    assert not parameters and modules == {"0": norm}
    assert names.tables_of(norm)[0]["weight"] is norm.weight
    schema = names.schema_of(torch.ops.aten.copy_.default)
    assert schema.name == "aten::copy_" and schema.arguments[0].alias_info.is_write


def test_a_local_address_is_read_as_a_path() -> None:
    import fsspec

    local = fsspec.filesystem("file")
    assert names.path_in(local, "file:///a/b::c.gz") == "/a/b::c.gz"
    assert names.path_in(local, "/a/b::c.gz") == "/a/b::c.gz"


def test_a_tokenizer_can_read_special_tokens_as_text() -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "?": 2}, "?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>"])
    assert [e.ids for e in made.encode_batch_fast(["a<s>"], add_special_tokens=False)] == [[0, 1]]
    made.encode_special_tokens = True
    assert made.encode("a <s>").ids == [0, 1] and made.encode("a<s>").ids == [2]


@pytest.mark.nightly
def test_marks_that_torch_sets_are_found() -> None:
    from torch.distributed.fsdp._flat_param import FlatParameter
    from torch.distributed.optim import _apply_optimizer_in_backward

    stepping, plain = nn.Linear(1, 1), nn.Linear(1, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    assert names.steps_in_backward(stepping.weight) and not names.steps_in_backward(plain.weight)

    flat = torch.ones(1)
    flat._is_flat_param = True
    assert isinstance(flat, FlatParameter)
    marked = nn.Parameter(torch.ones(1))
    setattr(marked, find("torch.distributed.fsdp._common_utils:FSDP_FLATTENED"), True)
    assert names.is_of_fsdp1(flat) and names.is_of_fsdp1(marked)
    assert not names.is_of_fsdp1(plain.weight)


def test_a_backends_class_history_and_records() -> None:
    history = names.memory_history(torch.cuda)
    assert history is not None
    assert {"enabled", "stacks", "max_entries"} <= set(inspect.signature(history[0]).parameters)
    assert names.memory_history(SimpleNamespace()) is None
    records = names.flight_records()
    assert records and all('"version"' in text for text in records)
    assert callable(find("torch.distributed.distributed_c10d:_get_split_source"))


def test_the_frame_of_a_backward_has_its_name() -> None:
    def innermost() -> list[str]:
        frame, found = sys._getframe(), []
        while frame is not None:
            found.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        return found

    assert names.BACKWARD_FRAME in in_a_backward(innermost)[0]


def test_operators_have_the_signatures_that_the_simulated_device_expects() -> None:
    words = [
        *names.WITHOUT_A_KERNEL,
        *names.OVERWRITING,
        *names.OF_UNKNOWN_SIZE,
        names.FOREACH_NORM,
    ]
    assert all(hasattr(torch.ops.aten, word) for word in words)
    assert names.FOREACH_NORM.startswith(names.OF_MANY_TENSORS)


def test_pytorchs_ddp_reads_the_same_mark_of_what_it_ignores() -> None:
    module = nn.Linear(1, 1)
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, ["weight"])
    assert getattr(module, names.IGNORED_BY_DDP) == ["weight"]


def test_a_missing_private_name_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "gone", "torch:_foreach_gone_")
    monkeypatch.setitem(NAMES, "moved", "torch._gone.away:tree_leaves")
    monkeypatch.setitem(NAMES, "bare", "torch:Tensor._gone()")
    for name, theirs in (
        ("gone", "torch._foreach_gone_"),
        ("moved", "torch._gone.away.tree_leaves"),
        ("bare", "torch.Tensor._gone"),
    ):
        with pytest.raises(UserError) as refusal:
            getattr(names, name)
        assert str(refusal.value) == (
            f"torch {versions.installed('torch')} has no {theirs}, which parallel3d uses; it was "
            "tried with torch 2.11 to 2.15: pip install 'torch>=2.11,<2.16'"
        )
    with pytest.raises(UserError, match=r"has no memory\._record_memory_history"):
        names.memory_history(SimpleNamespace(memory=SimpleNamespace(__name__="memory")))
    monkeypatch.setitem(SINCE, "gone", "99.0")
    assert names.gone is None  # type: ignore[attr-defined]
    monkeypatch.delitem(vars(names), "gone")


# --- Each is in one file ----------------------------------------------------------------

FOREIGN = ("torch", "hydra", "omegaconf", "wandb", "tokenizers", "numpy", "fsspec")
# Documented names, although they begin with an underscore.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_exit", "_getframe", "_current_frames"}
DOCUMENTED |= {"_DummyThread"}  # names of Python itself
DOCUMENTED |= {"_target_"}  # Hydra's key for a class
TYPES_ALONE = {"_typeshed"}


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.endswith("__") and word != "_"


def defined_in(tree: ast.AST) -> set[str]:
    """Returns names that a file defines: functions, classes, variables, attributes of its own
    objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def strangers(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, word) for each private name that the file itself does not define."""
    tree = ast.parse(source)
    own = defined_in(tree) | DOCUMENTED
    theirs = {place.rpartition(".")[2].rpartition(":")[2].strip("()") for place in NAMES.values()}
    theirs = {name for name in theirs if is_private(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            words = [*node.module.split("."), *(alias.name for alias in node.names)]
            if words[0] != "parallel3d" and words[0] not in TYPES_ALONE:
                yield from ((node.lineno, word) for word in words if is_private(word))
        elif isinstance(node, ast.Import):
            words = [word for alias in node.names for word in alias.name.split(".")]
            yield from ((node.lineno, word) for word in words if is_private(word))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in theirs - own:
                yield node.lineno, node.value
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            word = getattr(node.args[1], "value", None)
            reads = isinstance(node.func, ast.Name) and node.func.id in (
                "getattr",
                "hasattr",
                "setattr",
            )
            if reads and isinstance(word, str) and is_private(word) and word not in own:
                yield node.lineno, word


@pytest.mark.nightly
def test_no_other_file_uses_a_private_name_of_a_dependency() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted(ROOT.rglob("*.py"))
        if path != AT_HOME
        for line, word in strangers(path.read_text(encoding="utf-8"))
    ]
    assert not found, "take it from parallel3d/private_names.py: " + ", ".join(found)


CAUGHT = [
    "torch._foreach_mul_(a, 2)",
    "from torch._C import _distributed_c10d",
    "import torch._inductor.config",
    "import hydra._internal.utils",
    "storage._cdata",
    "group._get_backend(device)",
    "getattr(mesh, '_get_root_mesh', None)",
    "hasattr(parameter, '_is_flat_param')",
    "name = '_foreach_mul_'",
    "torch._C.Future",
]


@pytest.mark.parametrize("line", CAUGHT)
def test_the_search_finds_private_names(line: str) -> None:
    assert list(strangers(line))


@pytest.mark.parametrize(
    "line",
    ["self._x = 1\nself._x", "row._replace(a=1)", "x.__dict__", "from parallel3d._a import b"],
)
def test_our_own_private_names_are_allowed(line: str) -> None:
    assert not list(strangers(line))


MADE = {"_abc_impl", "_backward_cls"}  # used by metaclasses


# Its kernels need Triton, which machines without a GPU lack; it has no classes.
NEEDS_TRITON = "parallel3d.device.grouped_kernels"


def classes() -> Iterator[type]:
    for module in pkgutil.walk_packages([str(ROOT)], "parallel3d."):
        if not module.name.startswith(("parallel3d.__main__", NEEDS_TRITON)):
            yield from (
                kind
                for kind in vars(importlib.import_module(module.name)).values()
                if inspect.isclass(kind) and kind.__module__ == module.name
            )


def test_methods_that_override_private_ones_are_listed() -> None:
    """Code of other packages calls ours by these names: if they were renamed, ours would never
    run."""
    found: dict[str, set[str]] = {}
    for kind in classes():
        for base in kind.__mro__[1:]:
            if base.__module__.partition(".")[0] in FOREIGN:
                for name in set(vars(kind)) & set(vars(base)):
                    if is_private(name) and name not in MADE:
                        found.setdefault(base.__qualname__, set()).add(name)
    listed = {base.rpartition(".")[2]: set(methods) for base, methods in OVERRIDDEN.items()}
    if versions.parts(torch.__version__) >= (2, 15):
        listed["ProcessGroup"].remove("_set_sequence_number_for_group")
    assert found == listed
