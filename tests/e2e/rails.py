"""Makes hosts with rails from network namespaces by tests/tools/railnet, and runs on them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.command import ROOT
from tests.e2e.forked import Forked

RAILNET = ROOT / "tests" / "tools" / "railnet"
TOOLS = ("ip", "tc", "nsenter", "unshare")
SBIN = ("/usr/sbin", "/sbin")


def why_not() -> str | None:
    """Returns why no network can be made here, as a sentence; None if one can."""
    if sys.platform != "linux":
        return f"rails are made of Linux network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "rails are made of network namespaces, which needs root"
    path = os.pathsep.join((os.environ.get("PATH", ""), *SBIN))
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        return f"rails need {', '.join(missing)}: install iproute2 and util-linux"
    return None


@dataclass
class Rails:
    """A network that is up; hosts h1, h2, …, each with its GPU slots."""

    state: Path
    gpus: int

    @classmethod
    def start(cls, state: Path, *, hosts: int, gpus: int, options: tuple[str, ...] = ()) -> Rails:
        """`options` are railnet's (`--spine-mbit 20`); there are as many rails as GPUs per host."""
        prefix = f"p3d{uuid.uuid4().hex[:8]}"  # several tests may run at a time
        sizes = ("--hosts", str(hosts), "--gpus", str(gpus), "--rails", str(gpus))
        _railnet(state, "start", "--prefix", prefix, *sizes, *options)
        return cls(state, gpus)

    def set_link(self, host: str, *, up: bool) -> None:
        """Cuts a host off from all others, or joins it again; nothing tells the others."""
        spaces = json.loads((self.state / "railnet.json").read_text())["spaces"]
        inside = ("nsenter", f"--net={spaces[host]['netns_path']}")
        words = ("ip", "link", "set", "eth0", "up" if up else "down")
        subprocess.run((*inside, *words), check=True)

    def stop(self) -> None:
        """Ends everything that still runs in it, and removes it."""
        _railnet(self.state, "stop")

    def bytes_so_far(self) -> dict[str, Any]:
        return json.loads(_railnet(self.state, "counters"))

    def train(self, forked: Forked, slots: list[str], *words: str) -> Ran:
        """Trains with a process on every slot (`h2g1`), which the launcher numbers in this
        order."""
        return self.run(forked, slots, "train", *words)

    def run(self, forked: Forked, slots: list[str], *words: str, timeout_s: float = 120) -> Ran:
        """Runs any subcommand in the same way."""
        before = self.bytes_so_far()
        spaces = json.loads((self.state / "railnet.json").read_text())["spaces"]
        for launch_rank, slot in enumerate(slots):
            forked.add(
                *words,
                slot={
                    "host": slot.split("g")[0],
                    "netns": spaces[slot.removesuffix("g0")]["netns_path"],
                    "etc": str(self.state),
                },
                RANK=str(launch_rank),
                WORLD_SIZE=str(len(slots)),
                LOCAL_RANK=slot.split("g")[1],
                LOCAL_WORLD_SIZE=str(self.gpus),
                MASTER_ADDR=slots[0].split("g")[0],
                MASTER_PORT="29511",
                # The network of the rendezvous; the groups use other ones.
                GLOO_SOCKET_IFNAME="eth0",
            )
        forked.start()
        forked.finish(timeout_s)
        cwd = forked.shell.cwd
        (folder,) = (path for path in (cwd / "runs").iterdir())
        folder = folder.rename(cwd / f"run-{len(list(cwd.glob('run-*')))}")
        return Ran(folder, _less(self.bytes_so_far(), before))


@dataclass(frozen=True)
class Ran:
    """A run on rails: its directory, and the bytes that every switch received during the run."""

    folder: Path
    nbytes: dict[str, Any]

    def on(self, kind: str) -> int:
        """Returns the bytes on the switches of a kind: rail, nvl, mgmt; or over the spine."""
        if kind == "spine":
            return self.nbytes["spine"]
        return sum(n for name, n in self.nbytes["switch"].items() if name.startswith(kind))

    @property
    def step_times_s(self) -> list[float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [record["step_time_s"] for record in records if "step_time_s" in record]

    @property
    def losses(self) -> list[float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    @property
    def placed(self) -> dict[int, dict[str, Any]]:
        """Returns rank → its line of placement.json."""
        return Ran.map_in(self.folder)

    @staticmethod
    def map_in(folder: Path) -> dict[int, dict[str, Any]]:
        said = json.loads((folder / "placement.json").read_text())
        return {row["rank"]: row for row in said["ranks"]}


def _railnet(state: Path, verb: str, *words: str) -> str:
    command = (sys.executable, str(RAILNET), verb, "--state", str(state), *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _less(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _less(value, then[key]) if isinstance(value, dict) else value - then[key]
        for key, value in now.items()
    }
