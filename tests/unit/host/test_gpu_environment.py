"""Tests the variables of ranks on GPUs, without a GPU."""

from __future__ import annotations

import pytest

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.host import devices as gpu_environment
from parallel3d.run_config import Config

OLD_NCCL = "TORCH_DIST_USE_NCCL2"  # 0 selects the class of groups of torch before 2.15


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_environment, "is_nvidia_build", lambda: True)
    monkeypatch.setattr(gpu_environment, "compute_capability", lambda: 9)


def variables(config: Config, device: str = "cuda", **environ: str) -> dict[str, str]:
    cluster, tp, zero = config.cluster, config.tp, config.zero
    return gpu_environment.gpu_environment(device, environ, cluster, tp=tp, zero=zero)


def test_ranks_on_gpus_get_variables_that_the_user_has_not_set(nvidia: None) -> None:
    assert variables(Config()) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_DIST_USE_NCCL2": "0",
    }
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert set(variables(Config(), **{name: ""})) == {"TORCH_FR_BUFFER_SIZE", OLD_NCCL}
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        assert set(variables(Config(), **{name: "9"})) == {"PYTORCH_ALLOC_CONF", OLD_NCCL}
    of_cluster = Config(cluster=ClusterConfig(nccl_env=["TORCH_FR_BUFFER_SIZE:9"]))
    assert set(variables(of_cluster)) == {"PYTORCH_ALLOC_CONF", OLD_NCCL}
    assert OLD_NCCL not in variables(Config(), **{OLD_NCCL: "1"})
    of_cluster = Config(cluster=ClusterConfig(nccl_env=[f"{OLD_NCCL}:1"]))
    assert OLD_NCCL not in variables(of_cluster)


def test_ranks_on_the_cpu_and_other_builds_get_none(
    nvidia: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert variables(Config(tp=2), "cpu") == variables(Config(tp=2), "simulated") == {}
    monkeypatch.setattr(gpu_environment, "is_nvidia_build", lambda: False)
    assert variables(Config(tp=2)) == {}


@pytest.mark.parametrize(
    ("config", "capability", "ordered"),
    [
        (Config(tp=2), 9, True),
        (Config(tp=2, zero=1), 8, True),
        (Config(tp=2), None, True),
        (Config(tp=2), 10, False),
        (Config(tp=2, zero=3), 9, False),
        (Config(tp=2, sp=True), 9, True),
        (Config(pp=2), 9, False),
    ],
)
def test_kernels_start_in_order_if_a_collective_is_hidden_behind_a_gemm(
    nvidia: None,
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    capability: int | None,
    ordered: bool,
) -> None:
    monkeypatch.setattr(gpu_environment, "compute_capability", lambda: capability)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in variables(config)) is ordered
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in variables(config, CUDA_DEVICE_MAX_CONNECTIONS="8")
