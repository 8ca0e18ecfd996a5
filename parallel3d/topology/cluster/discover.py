"""Finds the cluster: from the configuration, from Slurm, or from nvidia-smi."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping

from parallel3d.config.cluster import ClusterConfig
from parallel3d.errors import UserError
from parallel3d.topology.cluster.gpus import local_cluster
from parallel3d.topology.cluster.parts import Cluster, cluster_from_config
from parallel3d.topology.cluster.slurm import slurm_cluster

PATIENCE_S = 30  # scontrol may wait for a busy controller


def discover(
    config: ClusterConfig,
    environ: Mapping[str, str],
    run: Callable[[list[str]], str],
    world_size: int | None = None,
    addresses: Mapping[str, tuple[str, str]] | None = None,
) -> Cluster:
    """Returns the cluster by `config.source` (config, slurm or local), with the configured speeds.

    Args:
        run: runs a command and returns its output, as `run_command` does.
        world_size: ranks that must fit, None: unknown.
        addresses: for slurm, SLURM_TOPOLOGY_ADDR and its pattern of each node, if gathered.

    Raises:
        UserError: the result cannot be read, contradicts itself or does not fit.
    """
    if config.source == "config":
        return cluster_from_config(config, world_size)
    if config.source == "local":
        return local_cluster(config, environ, run, world_size)
    cluster = slurm_cluster(config, environ, run, addresses)
    if world_size is not None and cluster.size < world_size:
        raise UserError(
            f"the Slurm job has {cluster.size} GPUs on {cluster.nodes} nodes, too few for "
            f"{world_size} ranks; ask Slurm for more tasks, or choose a smaller layout."
        )
    return cluster


def run_command(command: list[str]) -> str:
    """Returns the output of `command`. Raises UserError if it is missing, fails or times out."""
    line = " ".join(command)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S
        )
    except FileNotFoundError:
        raise UserError(
            f"{command[0]} is not installed here, and `{line}` would tell of the cluster; choose a "
            f"preset such as cluster=dgx_h100, or cluster=laptop."
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"`{line}` did not answer within {PATIENCE_S} seconds.") from None
    except OSError as error:
        raise UserError(f"`{line}` cannot be run: {error.strerror}.") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
        raise UserError(f"`{line}` failed with exit code {done.returncode} and said: {said}.")
    return done.stdout
