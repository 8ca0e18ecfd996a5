"""Finds the cluster from the configuration, from Slurm, or from nvidia-smi.

`nvidia-smi topo -m` prints a code for each pair of GPUs and NICs: NV# for # NVLinks, and from near
to far PIX (one PCIe bridge), PXB (several), PHB (host bridge), NODE (one NUMA node), SYS
(another socket).
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from parallel3d.blueprint.cluster import Cluster, cluster_from_config, cluster_of
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.device.datasheets import find_device
from parallel3d.errors import UserError
from parallel3d.topology.cluster.slurm import Run, shortened, slurm_cluster

PATIENCE_S = 30  # scontrol may wait for a busy controller


def discover(
    config: ClusterConfig,
    environ: Mapping[str, str],
    run: Run,
    world_size: int | None = None,
    addresses: Mapping[str, tuple[str, str]] | None = None,
) -> Cluster:
    """Finds the cluster by `config.source` (config, slurm or local), with the configured speeds.

    Args:
        run: runs a command and returns its output, like `run_command`.
        world_size: number of ranks that must fit, or None if it is unknown.
        addresses: each node's SLURM_TOPOLOGY_ADDR and pattern, or None if they were not gathered.

    Raises:
        UserError: if the result cannot be read, contradicts itself or does not fit.
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
            f"{command[0]} is not installed here, so `{line}` cannot describe the cluster; choose "
            "a preset such as cluster=dgx_h100, or cluster=laptop."
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"`{line}` did not answer within {PATIENCE_S} seconds.") from None
    except OSError as error:
        raise UserError(f"`{line}` cannot be run: {error.strerror}.") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
        raise UserError(f"`{line}` failed with exit code {done.returncode} and said: {said}.")
    return done.stdout


TOPO = "nvidia-smi topo -m"
NEAR_TO_FAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
NVLINK = re.compile(r"NV[1-9][0-9]?")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header of the matrix


@dataclass(frozen=True)
class GpuMatrix:
    """The matrix of `nvidia-smi topo -m`: codes from each GPU to all GPUs and to all NICs."""

    gpus: tuple[tuple[str, ...], ...]
    nics: tuple[tuple[str, ...], ...]

    def select(self, chosen: list[int]) -> GpuMatrix:
        """Returns the matrix of the GPUs `chosen`, in that order, like CUDA_VISIBLE_DEVICES."""
        gpus = tuple(tuple(self.gpus[a][b] for b in chosen) for a in chosen)
        return GpuMatrix(gpus, tuple(self.nics[a] for a in chosen))

    def domains(self) -> tuple[int, ...]:
        """Returns each GPU's NVLink domain: GPUs that NVLinks connect, directly or indirectly."""
        island = list(range(len(self.gpus)))
        for a, codes in enumerate(self.gpus):
            for b, code in enumerate(codes):
                if NVLINK.fullmatch(code) and island[a] != island[b]:
                    kept, gone = sorted((island[a], island[b]))
                    island = [kept if i == gone else i for i in island]
        numbers = {first: number for number, first in enumerate(sorted(set(island)))}
        return tuple(numbers[i] for i in island)

    def rails(self) -> tuple[int, ...] | None:
        """Returns the rail of each GPU's NIC, or None if the matrix does not determine it.

        GPUs choose in the order of their distance to the nearest NIC; among equally near NICs
        they take the least used one. The NICs in use are numbered as rails. A GPU has no nearest
        NIC if all NICs are on another socket, as for every GPU of a GB200.
        """
        taken: Counter[int] = Counter()
        nic_of: dict[int, int] = {}
        distance = [min(map(_distance, codes), default=len(NEAR_TO_FAR)) for codes in self.nics]
        for gpu in sorted(range(len(self.gpus)), key=lambda g: (distance[g], g)):
            if distance[gpu] >= NEAR_TO_FAR.index("SYS"):
                return None
            near = [n for n, c in enumerate(self.nics[gpu]) if _distance(c) == distance[gpu]]
            nic_of[gpu] = min(near, key=lambda nic: (taken[nic], nic))
            taken[nic_of[gpu]] += 1
        rail = {nic: number for number, nic in enumerate(sorted(taken))}
        return tuple(rail[nic_of[gpu]] for gpu in range(len(self.gpus)))


def _distance(code: str) -> int:
    return NEAR_TO_FAR.index(code)


def parse_gpu_matrix(text: str) -> GpuMatrix:
    """Parses the output of `nvidia-smi topo -m`.

    The columns are GPU0…, then the NICs, named `NIC0` or, by older drivers, `mlx5_0`; later columns
    (`CPU Affinity`…) are ignored.

    Raises UserError if there is no matrix, if a row is missing, cut off or unreadable, or if the
    halves of the matrix contradict each other.
    """
    lines = [COLOURS.sub("", line).split() for line in text.splitlines()]
    head = next((number for number, words in enumerate(lines) if words[:1] == ["GPU0"]), None)
    if head is None:
        raise UserError(f"{TOPO} printed no matrix of GPUs, but {shortened(text)!r}.")
    names = lines[head]
    columns = names[: names.index("CPU")] if "CPU" in names else names
    count = sum(bool(re.fullmatch(r"GPU[0-9]+", name)) for name in columns)
    if columns[:count] != [f"GPU{gpu}" for gpu in range(count)] or len(set(columns)) < len(columns):
        raise UserError(
            f"{TOPO}: the header {shortened(' '.join(names))!r} cannot be read: it must begin with "
            "GPU0, GPU1, … in this order, and name no column twice."
        )
    rows = {words[0]: words[1:] for words in lines[head + 1 :] if words and words[0] in columns}
    gpus = []
    nics = []
    for gpu in range(count):
        cells = rows.get(f"GPU{gpu}", [])[: len(columns)]
        fits = [
            code == "X"
            if place == gpu
            else code in NEAR_TO_FAR or (place < count and NVLINK.fullmatch(code))
            for place, code in enumerate(cells)
        ]
        if len(cells) < len(columns) or not all(fits):
            raise UserError(
                f"{TOPO}: the row of GPU{gpu}, {shortened(' '.join(cells))!r}, cannot be read: it "
                f"must have {len(columns)} cells, each of which is X (the GPU itself), NV followed "
                f"by a number (only between GPUs), or one of {', '.join(NEAR_TO_FAR)}."
            )
        gpus.append(tuple(cells[:count]))
        nics.append(tuple(cells[count:]))
    for a, b in itertools.combinations(range(count), 2):
        if gpus[a][b] != gpus[b][a]:
            raise UserError(
                f"{TOPO}: GPU{b} to GPU{a} is {gpus[b][a]}, but the reverse is {gpus[a][b]}."
            )
    return GpuMatrix(tuple(gpus), tuple(nics))


GPUS = "nvidia-smi --query-gpu=uuid,name,memory.total --format=csv,noheader,nounits"


class GpuRow(NamedTuple):
    """A row of nvidia-smi's list of GPUs, which is ordered by PCI address."""

    uuid: str
    name: str
    mib: int


def gpu_rows(run: Run) -> list[GpuRow]:
    """Returns the GPUs that nvidia-smi lists. Raises UserError if its output is unreadable."""
    text = run(GPUS.split())
    rows: list[GpuRow] = []
    for line in filter(str.strip, text.splitlines()):
        uuid, _, rest = line.partition(",")
        name, _, mib = rest.rpartition(",")
        if not name.strip() or not mib.strip().isdecimal():
            rows.clear()
            break
        rows.append(GpuRow(uuid.strip(), name.strip(), int(mib)))
    if not rows:
        raise UserError(
            f"`{GPUS}` printed {shortened(text)!r}; choose a preset such as cluster=dgx_h100"
        )
    return rows


def visible_gpus(environ: Mapping[str, str], count: int, run: Run) -> list[int]:
    """Returns nvidia-smi's numbers of the GPUs in CUDA_VISIBLE_DEVICES, or of all `count` GPUs.

    nvidia-smi numbers GPUs by PCI address, but CUDA puts the fastest first unless
    CUDA_DEVICE_ORDER is PCI_BUS_ID.

    Raises UserError for a mask that names other GPUs, or whose numbers are ambiguous.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    words = [word.strip() for word in text.split(",")]
    if all(re.fullmatch(r"[0-9]{1,4}", word) for word in words):
        chosen = [int(word) for word in words if int(word) < count]
        kinds = list(dict.fromkeys(row.name for row in gpu_rows(run)))
        if len(kinds) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={text!r} is ambiguous: CUDA numbers these GPUs "
                f"({' and '.join(kinds)}) by speed, but nvidia-smi by PCI address; set "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by their UUID (nvidia-smi -L)"
            )
    else:
        uuids = [row.uuid for row in gpu_rows(run)] if "GPU-" in text else []
        found = [[i for i, uuid in enumerate(uuids) if uuid.startswith(word)] for word in words]
        named = all(word.startswith("GPU-") for word in words)
        chosen = [i for each in found for i in each] if named else []
    if len(chosen) < len(words) or len(set(chosen)) < len(words) or len(chosen) > len(words):
        slices = " (a MIG slice does not count as a GPU)" if "MIG" in text else ""
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={text!r} must consist of numbers or UUIDs of the {count} GPUs "
            f"here{slices}, none of them twice, for cluster.source=local; unset it, or choose a "
            "preset such as cluster=dgx_h100."
        )
    return chosen


def local_cluster(
    config: ClusterConfig, environ: Mapping[str, str], run: Run, world_size: int | None = None
) -> Cluster:
    """Returns a cluster of `config.nodes` nodes like this one, or as many as `world_size` needs.

    Speeds, `unit_nodes` and the spine come from the configuration. So does a `domain_gpus` larger
    than a node, because a single node does not reveal it.

    Raises UserError if nvidia-smi fails or is unreadable, or if the sizes do not fit.
    """
    matrix = parse_gpu_matrix(run(TOPO.split()))
    matrix = matrix.select(visible_gpus(environ, len(matrix.gpus), run))
    name, count = environ.get("SLURMD_NODENAME"), len(matrix.gpus)
    nodes = config.nodes or -(-(world_size or 1) // count)
    if world_size is not None and nodes * count < world_size:
        raise UserError(
            f"cluster.nodes={nodes} is too small for {world_size} ranks with the {count} GPUs per "
            "node that nvidia-smi shows on this host; the nearest is "
            f"cluster.nodes={-(-world_size // count)}."
        )
    own: dict[str, Any] = {}
    if config.domain_gpus is None or config.domain_gpus <= count:
        own |= _own_domains(matrix)
    if config.rails is None and (nearest := matrix.rails()) is not None:
        own |= {"rails": max(nearest) + 1, "local_rail": nearest}
    origin = "nodes from nvidia-smi, the rest from the configuration"
    return cluster_of(config, nodes, count, origin, [name] if nodes == 1 and name else (), **own)


def _own_domains(matrix: GpuMatrix) -> dict[str, Any]:
    """Returns `domain_gpus` of a single node, and `local_domain` if its domains are uneven."""
    islands = matrix.domains()
    size = islands.count(0)
    if islands == tuple(gpu // size for gpu in range(len(islands))) and len(islands) % size == 0:
        return {"domain_gpus": size}
    return {"domain_gpus": len(islands), "local_domain": islands}


def with_own_gpus(cluster: ClusterConfig, environ: Mapping[str, str], run: Run) -> ClusterConfig:
    """Fills the cluster's GPU keys from nvidia-smi if `cluster.source=local` asks for it.

    Only GPUs in CUDA_VISIBLE_DEVICES count, and keys that are set keep their values. `run` works
    like `run_command`.

    Raises UserError if nvidia-smi is unreadable, or for GPUs of several kinds.
    """
    if cluster.source != "local" or cluster.gpu is not None:
        return cluster
    rows = gpu_rows(run)
    chosen = [rows[i] for i in visible_gpus(environ, len(rows), run)]
    kinds = list(dict.fromkeys(row.name for row in chosen))
    if len(kinds) > 1:
        raise UserError(
            f"this host's GPUs are {' and '.join(kinds)}, but all GPUs of a cluster must be of "
            "one kind: choose those of one kind with CUDA_VISIBLE_DEVICES, or give cluster.gpu and "
            "cluster.gpu_memory_gb"
        )
    name, mib = kinds[0], min(row.mib for row in chosen)
    known = find_device(name, memory=mib << 20)
    bandwidth = known.memory_gb_s or None if known else None  # 0 means that the datasheet lacks it
    return replace(
        cluster,
        gpu=name,
        gpus_per_node=cluster.gpus_per_node or len(chosen),
        gpu_memory_gb=cluster.gpu_memory_gb or mib * 2**20 / 1e9,
        gpu_memory_gb_per_s=cluster.gpu_memory_gb_per_s or bandwidth,
    )
