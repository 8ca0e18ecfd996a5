"""Runs PyTorch's own tests of DistributedDataParallel, with its class and with this project's.

    python -m tests.tools.pytorch_ddp [--only WORD] [--limit 120] [--jobs 1]

Takes `torch/testing/_internal/distributed/distributed_test.py` of the installed torch, replaces
CUDA's names by the CPU's and removes the skips of tests that need GPUs, in memory. Each test that
reaches DistributedDataParallel runs on two forked gloo ranks: first with PyTorch's class, and if
that passes on a CPU, with ours. Prints a table; nothing is written to the working tree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np

SOURCE = "torch.testing._internal.distributed.distributed_test"
RANKS = 2
SEED = 1234  # the seed of torch.testing
PASSED, FAILED, SKIPPED = 0, 1, 77
# Text in the file → its replacement for a CPU.
WORDS = (
    (r"\.cuda\((?:[^()]|\([^()]*\))*\)", ".cpu()"),
    (r"\.to\((self\.)?(rank|device_id)\)", ".cpu()"),
    (r"torch\.cuda\.(set_device|synchronize|Stream)\(", "_nothing("),
    (r"torch\.cuda\.stream\(", "nullcontext("),
    (r"torch\.cuda\.manual_seed\(", "torch.manual_seed("),
    (r"torch\.cuda\.device_count\(\)", str(RANKS)),
    (r"torch\.cuda\.current_device\(\)", 'torch.device("cpu")'),
    (r"torch\.cuda\.is_available\(\)", "False"),
    (r"output_device=(self\.)?rank\b", "output_device=None"),
    (r"device_ids=\[[^\]]*\]", "device_ids=None"),
    (r"\b(device|device_id|map_location)=(self\.)?(rank|device_id)\b", r'\1="cpu"'),
    (r'(?<!backend_feature\[)(?:f"cuda:\{[^}]*\}"|"cuda:0"|"cuda")', '"cpu"'),
)
WITHOUT_SKIPS = """
def _nothing(*_, **__): ...
def _always(*_, **__): return lambda test: test
skip_if_lt_x_gpu = nccl_skip_if_lt_x_gpu = require_n_gpus_for_nccl_backend = _always
skip_but_pass_in_sandcastle_if = requires_nccl_version = _always
skip_if_no_gpu = skip_if_rocm_multiprocess = lambda test: test
init_multigpu_helper = lambda world_size, _: {rank: [rank] for rank in range(int(world_size))}
"""


def read() -> str:
    """Returns the text of the file, changed for a CPU."""
    path = Path(find_spec("torch").submodule_search_locations[0]).parent
    text = path.joinpath(*SOURCE.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    for pattern, instead in WORDS:
        text = re.sub(pattern, instead, text)
    before, place, after = text.partition("\nclass NetWithBuffers(")
    return before + WITHOUT_SKIPS + place + after


def names_in(text: str) -> list[str]:
    """Returns the names of the tests that reach DistributedDataParallel, themselves or through
    functions that they call."""
    functions = {
        node.name: {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    reached = {"DistributedDataParallel"}
    while found := {f for f, names in functions.items() if f not in reached and names & reached}:
        reached |= found
    return sorted(name for name in reached if name.startswith("test_"))


def load(text: str) -> tuple[types.ModuleType, type[unittest.TestCase]]:
    """Returns the module, and its tests as a class."""
    if find_spec("expecttest") is None:  # torch's tests import it, but DDP's tests do not use it
        stub = types.ModuleType("expecttest")
        stub.TestCase, stub.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = stub
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    module = types.ModuleType("pytorch_ddp_tests_of_cpu")
    sys.modules[module.__name__] = module  # files of pickled modules contain its name
    code = compile(text, module.__name__, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    cases = type("Tests", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    return module, cases


def one_rank(
    module: types.ModuleType,
    cases: type[unittest.TestCase],
    name: str,
    rank: int,
    folder: str,
    ours: bool,
) -> int:
    """Runs a test as a rank; returns the exit code."""
    import torch
    import torch.distributed as dist

    if ours:
        from parallel3d import DistributedDataParallel

        for place in (torch.nn.parallel, torch.nn.parallel.distributed, module):
            place.DistributedDataParallel = DistributedDataParallel
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    os.environ["TEMP_DIR"] = folder
    module.Barrier.barrier_id = 0
    case = cases(name)
    case.rank, case.file_name = rank, f"{folder}/store"
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
        )
        # A rank that ends at once, by a skip, would break connections that others still make.
        connected = dist.FileStore(f"{folder}/connected", RANKS)
        connected.set(str(rank), "")
        connected.wait([str(each) for each in range(RANKS)])
        getattr(case, name)()
        case._barrier()
    except unittest.SkipTest as why:
        print(f"{type(why).__name__}: {why}")
        return SKIPPED
    except SystemExit as end:
        return PASSED if not end.code else SKIPPED
    except BaseException:
        traceback.print_exc()
        return FAILED
    return PASSED


@dataclass
class Run:
    """Runs a test on its ranks."""

    name: str
    ours: bool
    folder: tempfile.TemporaryDirectory = field(default_factory=tempfile.TemporaryDirectory)
    began: float = field(default_factory=time.monotonic)
    left: dict[int, int] = field(default_factory=dict)  # pid → rank
    codes: dict[int, int] = field(default_factory=dict)

    def start(self, module: types.ModuleType, cases: type[unittest.TestCase]) -> None:
        for part in ("barrier", "test_dir", "init_dir"):
            Path(self.folder.name, part).mkdir()
        sys.stdout.flush()
        for rank in range(RANKS):
            pid = os.fork()
            if pid:
                self.left[pid] = rank
                continue
            code = FAILED
            try:
                out = os.open(f"{self.folder.name}/out{rank}", os.O_CREAT | os.O_WRONLY)
                os.dup2(out, 1)
                os.dup2(out, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
                code = one_rank(module, cases, self.name, rank, self.folder.name, self.ours)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def ended(self, limit_s: float) -> bool:
        """Returns whether all ranks have ended; after the limit, or if a rank failed, it ends all
        of them."""
        for pid in list(self.left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[self.left.pop(pid)] = abs(os.waitstatus_to_exitcode(status))
        late = time.monotonic() - self.began > limit_s
        failed = any(code not in (PASSED, SKIPPED) for code in self.codes.values())
        if self.left and (late or failed):
            time.sleep(0 if late else 2)  # the other rank may fail with a clearer reason
            for pid in list(self.left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.codes[self.left.pop(pid)] = 124 if late else FAILED
        return not self.left

    def verdict(self) -> tuple[str, str]:
        """Returns the result, and for a failure the line with the reason."""
        codes, said = set(self.codes.values()), ""
        for rank in range(RANKS):
            lines = Path(self.folder.name, f"out{rank}").read_text(errors="replace").splitlines()
            errors = [x for x in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", x)]
            said = said or (errors[-1] if errors else "")
        self.folder.cleanup()
        if codes == {PASSED}:
            return "pass", ""
        if codes <= {PASSED, SKIPPED}:
            return "skip", ""
        return ("time" if 124 in codes else "fail"), said[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="tests whose names have this in them")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a test may take")
    parser.add_argument("--jobs", type=int, default=1, help="tests at once")
    options = parser.parse_args()
    text = read()
    module, cases = load(text)
    names = [n for n in names_in(text) if options.only in n and hasattr(cases, n)]
    waiting = [(name, False) for name in names]
    running: list[Run] = []
    found: dict[tuple[str, bool], tuple[str, str]] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            run = Run(*waiting.pop(0))
            run.start(module, cases)
            running.append(run)
        time.sleep(0.05)
        for run in [run for run in running if run.ended(options.limit)]:
            running.remove(run)
            found[run.name, run.ours] = result = run.verdict()
            print(f"{run.name} {'ours' if run.ours else 'PyTorch'}: {' '.join(result)}", flush=True)
            if not run.ours and result[0] == "pass":
                waiting.insert(0, (run.name, True))
    print("\n| test | PyTorch's class | ours | reason |\n|---|---|---|---|")
    for name in names:
        theirs, ours = found[name, False], found.get((name, True), ("", ""))
        print(f"| {name} | {theirs[0]} | {ours[0]} | {ours[1] or theirs[1]} |")
    passed = [name for name in names if found[name, False][0] == "pass"]
    good = sum(found[name, True][0] == "pass" for name in passed)
    of_theirs = f"PyTorch's class passes {len(passed)} on this CPU, of which ours {good}"
    print(f"\n{len(names)} tests; {of_theirs}")


if __name__ == "__main__":
    main()
