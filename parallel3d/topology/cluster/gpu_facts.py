"""What nvidia-smi says of a node: the matrix of `topo -m`.

It has a code for each pair of GPUs and NICs: NV# for # NVLinks, and from near to far
PIX (one PCIe bridge), PXB (several), PHB (host bridge), NODE (one NUMA node), SYS (another socket).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from parallel3d.errors import UserError
from parallel3d.topology.cluster.slurm_names import shortened

TOPO = "nvidia-smi topo -m"
NEAR_TO_FAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
NVLINK = re.compile(r"NV[1-9][0-9]?")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the head of the matrix


@dataclass(frozen=True)
class GpuMatrix:
    """The matrix of `nvidia-smi topo -m`: codes from each GPU to all GPUs, and to all NICs."""

    gpus: tuple[tuple[str, ...], ...]
    nics: tuple[tuple[str, ...], ...]

    def select(self, chosen: list[int]) -> GpuMatrix:
        """The matrix of some of the GPUs, in that order, as CUDA_VISIBLE_DEVICES takes them."""
        gpus = tuple(tuple(self.gpus[a][b] for b in chosen) for a in chosen)
        return GpuMatrix(gpus, tuple(self.nics[a] for a in chosen))

    def domains(self) -> tuple[int, ...]:
        """For each GPU the number of its island: GPUs that NVLink joins, directly or in steps."""
        island = list(range(len(self.gpus)))
        for a, codes in enumerate(self.gpus):
            for b, code in enumerate(codes):
                if NVLINK.fullmatch(code) and island[a] != island[b]:
                    kept, gone = sorted((island[a], island[b]))
                    island = [kept if i == gone else i for i in island]
        numbers = {first: number for number, first in enumerate(sorted(set(island)))}
        return tuple(numbers[i] for i in island)

    def rails(self) -> tuple[int, ...] | None:
        """For each GPU the number of its NIC's rail; None where the matrix does not tell.

        Each GPU takes a nearest NIC, the least taken one where several are as near; the GPUs with
        the nearest choose first. The NICs in use are the rails, in their order. A GPU whose NICs
        are all on another socket (all of them on a GB200) has no nearest one.
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
    """Read `nvidia-smi topo -m`.

    Raises:
        UserError: no matrix in it, a row that is missing, cut off or unreadable, or one half of
            the matrix that contradicts the other.
    """
    lines = [COLOURS.sub("", line).split() for line in text.splitlines()]
    head = next((number for number, words in enumerate(lines) if words[:1] == ["GPU0"]), None)
    if head is None:
        raise UserError(f"{TOPO} printed no matrix of GPUs, but {shortened(text)!r}.")
    columns = _columns(lines[head])
    count = sum(name.startswith("GPU") for name in columns)
    rows = {words[0]: words[1:] for words in lines[head + 1 :] if words and words[0] in columns}
    gpus, nics = [], []
    for gpu in range(count):
        cells = rows.get(f"GPU{gpu}", [])[: len(columns)]
        if len(cells) < len(columns):
            raise UserError(
                f"{TOPO}: the row of GPU{gpu} has {len(cells)} cells, not {len(columns)}: is it "
                f"cut off?"
            )
        _check_cells(gpu, cells, count)
        gpus.append(tuple(cells[:count]))
        nics.append(tuple(cells[count:]))
    for a in range(count):
        for b in range(a):
            if gpus[a][b] != gpus[b][a]:
                raise UserError(
                    f"{TOPO}: GPU{a} to GPU{b} is {gpus[a][b]}, but back it is {gpus[b][a]}."
                )
    return GpuMatrix(tuple(gpus), tuple(nics))


def _columns(words: list[str]) -> list[str]:
    """GPU0…, then the NICs: `NIC0` with a legend below, or `mlx5_0` itself in older drivers.

    The columns after them are `CPU Affinity` and the like.
    """
    columns = words[: words.index("CPU")] if "CPU" in words else words
    count = sum(bool(re.fullmatch(r"GPU[0-9]+", name)) for name in columns)
    if columns[:count] != [f"GPU{gpu}" for gpu in range(count)] or len(set(columns)) < len(columns):
        raise UserError(f"{TOPO}: the head {shortened(' '.join(words))!r} does not count the GPUs.")
    return columns


def _check_cells(gpu: int, cells: list[str], count: int) -> None:
    for place, code in enumerate(cells):
        fits = code in NEAR_TO_FAR or (place < count and NVLINK.fullmatch(code))
        if place == gpu:
            fits = code == "X"
        if not fits:
            raise UserError(
                f"{TOPO}: {shortened(code)!r} in the row of GPU{gpu} is not known: it must be "
                f"{', '.join(NEAR_TO_FAR)}, NV and a number between GPUs, X for itself."
            )
