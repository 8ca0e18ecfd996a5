"""Finds the GPUs of this host that torch can use, and signs that a GPU is intended.

Torch is not imported. The driver is asked, which applies the same masks and order (the fastest GPU
first) as in the ranks; NVML and nvidia-smi number the GPUs differently. A wrong `device` must be
refused within two seconds, and the import of torch alone takes one second.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.errors import UserError, first_line
from parallel3d.text import count

ROOT = Path("/")
MASKS = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("GPU_DEVICE_ORDINAL", "CUDA_DEVICE_ORDER"),
)
NOTHING = ("", "-1", "NoDevFiles", "none", "void")  # a mask that hides all GPUs
# Variables in which a scheduler or a platform gives the GPUs of a job, or their number.
OF_JOBS = re.compile(
    r"SLURM_GPUS(_ON_NODE|_PER_NODE|_PER_TASK|_PER_SOCKET)?|SLURM_(JOB|STEP)_GPUS|PBS_NGPUS"
    r"|PBS_GPUFILE|SGE_HGR_gpu|SLURM_TRES_PER_TASK|LSB_GPU_REQ|SKYPILOT_NUM_GPUS_PER_NODE"
    r"|SM_NUM_GPUS|DSTACK_GPUS_NUM|BEAKER_ASSIGNED_GPU_COUNT|MA_NUM_GPUS|MLP_WORKER_GPU"
    r"|NGC_GPUS_PER_NODE|LEPTON_RESOURCE_ACCELERATOR_NUM"
)
# A GPU for computing has at least this many bytes of its own memory, whereas a laptop's GPU shares
# the processor's memory.
OWN_MEMORY = 8 << 30


class VisibleGpu(NamedTuple):
    """One GPU as CUDA or HIP shows it to this process; "" and 0 stand for unknown values.

    Attributes:
        bus: PCI address.
        units: number of multiprocessors.
        memory: bytes of memory.
        capability: major compute capability.
    """

    uuid: str = ""
    name: str = ""
    bus: str = ""
    units: int = 0
    memory: int = 0
    capability: int = 0

    @property
    def identity(self) -> str:
        """Returns a string that identifies the GPU among all hosts; "" if it is unknown."""
        return self.uuid or (f"{boot_id()}/{self.bus}" if self.bus else "")


class GpuFindings(NamedTuple):
    """The findings about this host's GPUs.

    Attributes:
        gpus: GPUs that torch can use, in torch's order.
        fault: why an existing GPU cannot be used, and what to do; "" without such a GPU.
        lack: why there is no GPU, if the driver reports none or there is no driver.
        hints: signs that a GPU is intended.
        remark: a weak sign that a GPU is intended; it does not count as a hint.
        hidden: the mask with which the user hides all GPUs; "" if none, or in a scheduler's job.
        on_host: number of GPUs on this host, including those that this process does not see.
    """

    gpus: tuple[VisibleGpu, ...] = ()
    fault: str = ""
    lack: str = ""
    hints: tuple[str, ...] = ()
    remark: str = ""
    hidden: str = ""
    on_host: int = 0


class Answer(NamedTuple):
    """The driver's answer: GPUs, an error code, or an error in words."""

    gpus: tuple[VisibleGpu, ...] = ()
    code: int = 0
    error: str = ""


def find(environ: Mapping[str, str]) -> GpuFindings:
    """Returns the findings about this host. Raises UserError if torch is not installed."""
    build = torch_build()
    gpus, fault, lack = _usable(build, environ)
    on_host = max(len(gpus), len(_device_files(ROOT)))
    if gpus:
        return GpuFindings(gpus, on_host=on_host)
    if fault:
        return GpuFindings((), fault)
    of_job = _of_job(environ)
    masks = {name: environ[name].strip() for name in MASKS[:-1] if name in environ}
    empty = [f"{name}={mask or repr('')}" for name, mask in masks.items() if mask in NOTHING]
    if empty:
        lack = f"{' and '.join(empty)} hides all GPUs"
    if empty and not of_job and "SLURM_JOB_ID" not in environ:
        return GpuFindings(lack=lack, hidden=empty[0])
    given = [f"{name}={mask}" for name, mask in masks.items() if mask not in NOTHING]
    hints = [*of_job, *given, *_of_machine(ROOT)]
    return GpuFindings(lack=lack, hints=tuple(hints), remark=_remark(environ, ROOT))


def _usable(
    build: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[tuple[VisibleGpu, ...], str, str]:
    """Returns (GPUs, reason why existing GPUs cannot be used, reason why there are none)."""
    masks = tuple((name, environ[name]) for name in MASKS if name in environ)
    if build.get("hip"):
        if contradiction := _contradicting(environ):
            return (), contradiction, ""
        answer = _asked_rocm(masks)
        if answer.error:
            return (
                (),
                f"torch {build['__version__']} for ROCm cannot count its GPUs: {answer.error}",
                "",
            )
        inner = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        last = next((name for name in inner if name in environ), "")
        if missing := _missing(last, environ, len(answer.gpus)):
            return (), missing, ""
        return answer.gpus, "", "ROCm shows no GPU"
    if not build.get("cuda"):
        return (), "", f"the installed torch {build.get('__version__')} is a build without CUDA"
    driver = _driver()
    if driver is None:
        return (), "", "there is no driver library (libcuda.so.1)"
    answer = _asked_cuda(masks)
    if answer.code != NO_DEVICE and (old := _too_old(driver, build)):
        return (), old, ""
    if answer.error:
        return (), answer.error, ""
    if answer.code not in (0, NO_DEVICE):
        return (), code_words(answer.code), ""
    if missing := _missing("CUDA_VISIBLE_DEVICES", environ, len(answer.gpus)):
        return (), missing, ""
    return answer.gpus, "", f"the driver shows no GPU ({NO_DEVICE} CUDA_ERROR_NO_DEVICE)"


# The driver

NO_DEVICE = 100
NOT_INITIALIZED = 3
BROKEN = "nvidia-smi or dmesg may say more; reset the GPU, or restart the host"
CODES = {
    2: (
        "OUT_OF_MEMORY",
        "a GPU's memory is full: end other processes on it (nvidia-smi lists them)",
    ),
    3: ("NOT_INITIALIZED", "restart this process"),
    34: ("STUB_LIBRARY", "remove the folder cuda/lib64/stubs from LD_LIBRARY_PATH"),
    46: (
        "DEVICE_UNAVAILABLE",
        "another process has exclusive use of a GPU (nvidia-smi -q -d COMPUTE)",
    ),
    101: ("INVALID_DEVICE", "check CUDA_VISIBLE_DEVICES"),
    201: ("INVALID_CONTEXT", BROKEN),
    214: ("ECC_UNCORRECTABLE", BROKEN),
    304: ("OPERATING_SYSTEM", "check the limits (ulimit) and dmesg"),
    800: ("NOT_PERMITTED", "check the permissions of /dev/nvidia*"),
    801: ("NOT_SUPPORTED", "check the driver's version"),
    802: ("SYSTEM_NOT_READY", "start the fabric manager (systemctl start nvidia-fabricmanager)"),
    803: (
        "SYSTEM_DRIVER_MISMATCH",
        "the driver's library and its kernel module have different versions: restart the host",
    ),
    804: (
        "COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "the library for forward compatibility does not support this GPU: remove cuda/compat from "
        "LD_LIBRARY_PATH",
    ),
    805: ("MPS_CONNECTION_FAILED", "start MPS (nvidia-cuda-mps-control -d), or unset CUDA_MPS_*"),
    806: ("MPS_RPC_FAILURE", "restart MPS"),
    807: ("MPS_SERVER_NOT_READY", "wait for MPS, or restart it"),
    808: ("MPS_MAX_CLIENTS_REACHED", "end another process that uses MPS"),
    809: ("MPS_MAX_CONNECTIONS_REACHED", "end another process that uses MPS"),
    999: ("UNKNOWN", "restart the host, or reload the driver's module (nvidia-modprobe -u)"),
}


def code_words(code: int) -> str:
    """Returns words for the driver's error code: its number, its name and a remedy."""
    name, remedy = CODES.get(code, ("", BROKEN))
    named = f" CUDA_ERROR_{name}" if name else ""
    return f"the driver does not start (cuInit: {code}{named}): {remedy}"


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _too_old(driver: ctypes.CDLL, build: Mapping[str, Any]) -> str:
    """Returns a sentence if the driver is too old for torch's major version of CUDA, or ""."""
    found = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(found)) != 0:
        return ""
    major, minor = found.value // 1000, found.value % 1000 // 10
    wanted = str(build["cuda"])
    if major >= int(wanted.partition(".")[0]):
        return ""
    return (
        f"its driver is for CUDA {major}.{minor}, but the installed torch "
        f"{build.get('__version__')} is built for CUDA {wanted}: update the driver or install a "
        f"torch for CUDA {major}"
    )


@functools.lru_cache(maxsize=4)
def _asked_cuda(masks: tuple[tuple[str, str], ...]) -> Answer:
    driver = _driver()
    assert driver is not None  # the caller has loaded the driver
    answer = in_subprocess(lambda: ask_cuda(driver))
    # The child of a process that has used CUDA cannot start the driver, but then asking the driver
    # in this process costs nothing.
    return ask_cuda(driver) if answer.code == NOT_INITIALIZED else answer


def ask_cuda(driver: ctypes.CDLL) -> Answer:
    """Starts the driver in this process, and returns its answer."""
    count = ctypes.c_int(0)
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return Answer(code=code)
    return Answer(tuple(_cuda_gpu(driver, index) for index in range(count.value)))


UNITS, CAPABILITY = 16, 75  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, …_COMPUTE_CAPABILITY_MAJOR


def _cuda_gpu(driver: ctypes.CDLL, index: int) -> VisibleGpu:
    gpu = ctypes.c_int(0)
    raw = (ctypes.c_ubyte * 16)()
    memory = ctypes.c_size_t(0)
    text = ctypes.create_string_buffer(96)

    def number(attribute: int) -> int:
        found = ctypes.c_int(0)
        failed = driver.cuDeviceGetAttribute(ctypes.byref(found), attribute, gpu)
        return 0 if failed else found.value

    def words(call: Callable[..., int]) -> str:
        return "" if call(text, len(text), gpu) else text.value.decode(errors="replace")

    if driver.cuDeviceGet(ctypes.byref(gpu), index) != 0:
        return VisibleGpu()
    # The second version distinguishes slices (MIG) of one GPU.
    known = driver.cuDeviceGetUuid_v2(raw, gpu) == 0
    sized = driver.cuDeviceTotalMem_v2(ctypes.byref(memory), gpu) == 0
    return VisibleGpu(
        f"GPU-{uuid.UUID(bytes=bytes(raw))}" if known and any(raw) else "",
        words(driver.cuDeviceGetName),
        words(lambda *given: driver.cuDeviceGetPCIBusId(*given)),
        number(UNITS),
        memory.value if sized else 0,
        number(CAPABILITY),
    )


@functools.lru_cache(maxsize=4)
def _asked_rocm(masks: tuple[tuple[str, str], ...]) -> Answer:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return ask_rocm()
    return in_subprocess(ask_rocm)


def ask_rocm() -> Answer:
    import torch  # a ROCm build has no driver library that would be cheaper to ask

    found = []
    for index in range(torch.cuda.device_count()):
        facts: Any = torch.cuda.get_device_properties(index)
        bus = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        name = facts.name
        units = facts.multi_processor_count
        memory = facts.total_memory
        # Partitions of one GPU (CPX) share its address and differ by their UUID.
        found.append(VisibleGpu(f"GPU-{facts.uuid}", name, bus, units, memory, facts.major))
    return Answer(tuple(found))


def in_subprocess(ask: Callable[[], Answer]) -> Answer:
    """Runs `ask` in a process of its own and returns its answer; failures become an error text.

    The call initialises the driver, and a process that is forked afterwards, such as a local rank,
    could not initialise the driver again.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                answer = ask()
            except BaseException as error:
                answer = Answer(error=f"{type(error).__name__}: {first_line(error)}")
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                json.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not text:
        how = f"{signal.Signals(-code).name}" if code < 0 else f"code {code}"
        return Answer(error=f"the process that asked for GPUs ended with {how}")
    gpus, number, said = json.loads(text)
    return Answer(tuple(VisibleGpu(*gpu) for gpu in gpus), number, said)


# Masks


def _missing(name: str, environ: Mapping[str, str], count: int) -> str:
    """Returns a sentence if the mask in `name` has more GPUs than the driver shows, or "" if not.

    The driver shows only the GPUs that the mask names before the first one that does not exist.
    """
    mask = environ.get(name, "")
    words = [word.strip() for word in mask.split(",")]
    named = all(re.fullmatch(r"[0-9]+|GPU-[0-9a-fA-F-]+", word) for word in words)
    if not named or not 0 < count < len(words):
        return ""
    return (
        f"{name}={mask} names {len(words)} GPUs, but the driver shows {count} of them: name each "
        "existing GPU once"
    )


def _contradicting(environ: Mapping[str, str]) -> str:
    """Returns a sentence if the masks of ROCm contradict each other, or "" if not.

    ROCR_VISIBLE_DEVICES numbers the host's GPUs, and the other masks number the remaining ones.
    """
    lists = {name: _numbers(environ.get(name)) for name in MASKS[:3]}
    cuda, hip, rocr = lists.values()
    if cuda is not None and hip is not None and cuda != hip:
        return (
            f"HIP_VISIBLE_DEVICES={environ['HIP_VISIBLE_DEVICES']} contradicts "
            f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']}: unset one of them"
        )
    inner = hip if hip is not None else cuda
    name = MASKS[1] if hip is not None else MASKS[0]
    if rocr is not None and inner is not None and max(inner, default=0) >= len(rocr) > 0:
        return (
            f"ROCR_VISIBLE_DEVICES={environ['ROCR_VISIBLE_DEVICES']} leaves "
            f"{count(len(rocr), 'GPU')}, numbered from 0, but {name}={environ[name]} names others: "
            f"unset {name}"
        )
    return ""


def _numbers(mask: str | None) -> list[int] | None:
    words = [word.strip() for word in (mask or "").split(",")]
    return [int(word) for word in words] if all(map(str.isdecimal, words)) else None


# Hints that a GPU is intended


def _of_job(environ: Mapping[str, str]) -> list[str]:
    """Returns the scheduler's variables that give the job GPUs."""
    found = []
    for name, value in sorted(environ.items()):
        wanted = value.strip() not in ("", "0", "(null)", "N/A", *NOTHING)
        if name == "SLURM_TRES_PER_TASK":
            wanted = bool(re.search(r"gres[/:]gpu", value))
        if name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):  # lists of indices, so 0 is a GPU
            wanted = value.strip() not in ("", *NOTHING)
        if OF_JOBS.fullmatch(name) and wanted:
            found.append(f"{name}={value}")
    return found


def _device_files(root: Path) -> list[str]:
    return sorted(f"/dev/{path.name}" for path in (root / "dev").glob("nvidia[0-9]*"))


def _of_machine(root: Path) -> list[str]:
    """Returns hints from the machine: device files, nvidia-smi's list, or NVIDIA's cards."""
    found = _device_files(root)[:1]
    if (root / "dev/kfd").exists() and _computes(root):
        found.append("/dev/kfd")
    if found or shutil.which("nvidia-smi") is None:
        return found
    if listed := _listed():
        return [f"nvidia-smi says {listed!r}"]
    if cards := _nvidia_cards(root):
        return [f"an NVIDIA card is at {cards[0]}, though its driver shows nothing"]
    return []


def _computes(root: Path) -> bool:
    """Returns whether a GPU behind /dev/kfd has memory of its own; True if that is unknown.

    The file also exists for the graphics unit of an AMD processor, which has no such memory.
    """
    nodes = list((root / "sys/class/kfd/kfd/topology/nodes").glob("*"))
    sizes = [_bank_size(bank) for node in nodes for bank in node.glob("mem_banks/*/properties")]
    return not sizes or max(sizes) >= OWN_MEMORY


def _bank_size(bank: Path) -> int:
    """Returns the bytes of a bank of a GPU's own memory (heaps 1 and 2); 0 for system memory."""
    fields = dict(line.split()[:2] for line in _lines(bank) if len(line.split()) >= 2)
    return int(fields.get("size_in_bytes", 0)) if fields.get("heap_type") in ("1", "2") else 0


def _listed() -> str:
    """Returns the first line of `nvidia-smi -L`; "" if it fails or reports no GPU."""
    try:
        ended = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if ended.returncode or "no devices" in ended.stdout.lower():
        return ""
    return ended.stdout.partition("\n")[0].partition(" (UUID")[0] or "no error"


def _nvidia_cards(root: Path) -> list[str]:
    """Returns the PCI addresses of NVIDIA's display and 3D controllers."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind = ("".join(_lines(device / name)) for name in ("vendor", "class"))
        if vendor == "0x10de" and kind.startswith("0x03"):
            found.append(device.name)
    return found


def _remark(environ: Mapping[str, str], root: Path) -> str:
    """Returns a weak sign that a GPU is intended, and a remedy, or "" without such a sign."""
    image = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    how = "a container gets them with docker run --gpus all or apptainer exec --nv"
    if gpus := len(list((root / "proc/driver/nvidia/gpus").glob("*"))):
        return f"the host's driver has {count(gpus, 'GPU')}; {how}"
    if image.strip() not in NOTHING:
        return f"NVIDIA_VISIBLE_DEVICES={image} comes from an image for GPUs; {how}"
    if shutil.which("nvidia-smi") is not None:
        return "nvidia-smi is installed, but lists no GPU"
    return ""


def _lines(path: Path) -> Iterable[str]:
    """Returns the lines of a kernel file, or none if there is no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return ()


def boot_id() -> str:
    """Returns an identifier of the host's current boot."""
    return "".join(_lines(ROOT / "proc/sys/kernel/random/boot_id"))


# torch


def torch_build() -> dict[str, Any]:
    """Returns the constants of torch/version.py (`cuda`, `hip`, `__version__`), without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("torch is not installed: run launch/setup.sh or pip install torch")
    return runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))


def is_nvidia_build() -> bool:
    return bool(torch_build().get("cuda"))
