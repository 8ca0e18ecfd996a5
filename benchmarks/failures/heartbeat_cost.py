"""Measures what heartbeats cost: the collector, a guard, and a step with its file of progress.

    python -m benchmarks.failures.heartbeat_cost

`collector`: CPU time of one round of beats of many guards, each with eight ranks. `guard`: its
memory, and its share of a core while it watches eight ranks with the limits of a real run. `step`:
CPU time of steps of a tiny model, of which every other one tells its progress.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from parallel3d.faults.progress import SHARED_MEMORY, ProgressFile
from parallel3d.slurm.collector import Collector
from parallel3d.slurm.messages import message
from parallel3d.slurm.verdict import RankReport
from tests.pace import pace
from tests.unit.slurm.hosts import START, started_guard

SECRET = "a-secret"
RANKS = 8
MARGIN = 1.5  # of `pace`


def of_collector(guards: int, rounds: int) -> None:
    """Receives the beats of all guards of a start, which a process of their own plays."""
    nodes = [f"node-{number}" for number in range(guards)]
    collector = Collector(SECRET, START, nodes)
    collector.watch(nodes)
    took: list[float] = []
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        _play(nodes, collector.port, rounds, tells)
        os._exit(0)
    os.close(tells)
    last = time.process_time()
    while os.read(told, 1):
        now = time.process_time()
        took.append(now - last)
        last = now
    os.waitpid(child, 0)
    collector.close()
    rest = sorted(took[1:])
    print(f"collector: {guards} guards with {RANKS} ranks each: CPU of a round {_ms(rest)}")


def _play(nodes: Sequence[str], port: int, rounds: int, tells: int) -> None:
    """Sends a beat of each guard in a round, and tells when all are acknowledged."""
    ranks = [RankReport(rank, "S", "stepping", 1234, 0.321, 0.75) for rank in range(RANKS)]
    peers = {node: socket.create_connection(("127.0.0.1", port)) for node in nodes}
    for number in range(1, rounds + 1):
        for node, peer in peers.items():
            beat = {"node": node, "ranks": ranks}
            peer.sendall(message(SECRET.encode(), "guard", START, number, beat))
        for peer in peers.values():
            while not peer.recv(4096).endswith(b"\n"):
                pass
        os.write(tells, b".")


def _ms(seconds: Sequence[float]) -> str:
    middle = statistics.median(seconds)
    return f"{1e3 * middle:.1f} ms (median of {len(seconds)}, at most {1e3 * max(seconds):.1f} ms)"


def of_guard(seconds: float) -> None:
    """Watches files of this process with a real guard."""
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root) / "progress")
        collector = Collector(SECRET, START, ["a"])
        words = ["--collector", f"127.0.0.1:{collector.port}", "--start", str(START)]
        words += ["--job", "none", "--progress", folder, "--node", "a"]
        guard = started_guard(words)
        collector.wait_for_answers(60.0)
        for rank in range(RANKS):
            ProgressFile(f"{folder}/rank-{rank}").resume()
        time.sleep(1.0)
        before = _cpu_of(guard.pid)
        time.sleep(seconds)
        share = (_cpu_of(guard.pid) - before) / seconds
        status = Path(f"/proc/{guard.pid}/status").read_text()
        kb = {w.split(":")[0]: int(w.split()[1]) for w in status.splitlines() if " kB" in w}
        guard.kill()
        guard.wait()
        collector.close()
    print(
        f"guard: {share:.2%} of a core; {kb['VmRSS'] / 1024:.0f} MiB of memory, of which "
        f"{kb['RssAnon'] / 1024:.0f} MiB are its own"
    )


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def of_step(pairs: int) -> None:
    """Steps a tiny model, in pairs of which one step tells its progress, in turns first."""
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(256, 512)
    torch.set_num_threads(1)

    def step(progress: ProgressFile | None) -> float:
        begin = time.thread_time()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if progress is not None:
            progress.step_ended()
        return time.thread_time() - begin

    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as root:
        progress = ProgressFile(f"{root}/rank-0")
        progress.resume()
        plain, told = [], []
        for number in range(pairs + 20):
            first = step(progress) if number % 2 else 0.0
            without = step(None)
            kept = first or step(progress)
            if number >= 20:
                plain.append(without)
                told.append(kept)
        begin = time.perf_counter()
        for _ in range(10000):
            progress.step_ended()
        alone = (time.perf_counter() - begin) / 10000
    middle = statistics.median(plain)
    more = statistics.median(b - a for a, b in zip(plain, told, strict=True))
    print(
        f"step: {1e3 * middle:.3f} ms without, {1e6 * more:+.1f} µs with a file of progress "
        f"({more / middle:+.3%}, {pairs} pairs); telling alone takes {1e6 * alone:.1f} µs"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guards", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0, help="time to watch a guard for")
    parser.add_argument("--pairs", type=int, default=500)
    given = parser.parse_args()
    slow = pace(time.process_time) / MARGIN
    print(f"this machine takes {slow:.1f} times the CPU time of an idle core")
    of_collector(given.guards, given.rounds)
    of_guard(given.seconds)
    of_step(given.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
