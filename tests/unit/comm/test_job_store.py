"""Tests where the ranks' store listens, and which of its messages are accepted."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel3d.comm import store as job_store
from parallel3d.comm.store import SECRET, behind_secret, get, listen_at, put
from parallel3d.errors import UserError
from parallel3d.run import agreement, rendezvous
from parallel3d.run.agreement import assign_rank, tell_rank_0
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import Worker
from parallel3d.run.launcher_environment import RankAssignment
from parallel3d.run.local_workers import _rank_environment, listen_here
from parallel3d.run.rendezvous import RankZerosError
from parallel3d.run_config import Config
from tests.ports import free_port

AGENT = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")


def listeners(port: int) -> set[str]:
    """Returns the addresses on which this machine listens at a port, as the kernel writes them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, _, number = line.split()[1].partition(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                found.add(address)
    return found


LOOPBACK = {"0100007F"}
EVERYWHERE = {"00000000", "0" * 32}


def address_of_the_network() -> str | None:
    """Returns an address of this machine that is not its loopback's; nothing is sent for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.200", 9))
        except OSError:
            return None
        name = probe.getsockname()[0]
    return None if name.startswith("127.") else name


def place(master: str, port: int, launcher: str = "slurm", hosts: int = 1) -> RankAssignment:
    return RankAssignment(launcher, 0, 0, 2 * hosts, 2, master, port, "7")


def test_store_of_a_local_run_is_not_reached_from_the_network() -> None:
    listening = listen_here(0)
    port = listening.getsockname()[1]
    store = job_store.serve("127.0.0.1", listening)
    assert store.port == port
    assert listeners(port) == LOOPBACK
    dist.TCPStore("127.0.0.1", port, wait_for_workers=False)  # the store listens
    if address := address_of_the_network():
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect((address, port))


def test_taken_port_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError) as refused:
        listen_here(taken.getsockname()[1])
    assert "launch.master_port=" in str(refused.value)


def test_local_ranks_listen_where_nobody_else_comes() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth0"}  # a variable for runs on several hosts
    assert job_store.one_host_environment(environ) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    named = job_store.one_host_environment({"NCCL_SOCKET_IFNAME": "eth0"})
    assert named["NCCL_SOCKET_IFNAME"] == "eth0"


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*AGENT, SECRET):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_rank_0_listens_on_the_address_of_master_addr_alone(launcher: str) -> None:
    port = free_port()
    store = rendezvous.rendezvous(LaunchConfig(), None, place("localhost", port, launcher))
    assert listeners(port) == LOOPBACK
    store.set("a", "1")
    if address := address_of_the_network():
        port = free_port()
        kept = rendezvous.rendezvous(LaunchConfig(), None, place(address, port, launcher, hosts=2))
        (found,) = listeners(port)
        assert found == socket.inet_aton(address)[::-1].hex().upper()
        del kept


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("master", ["our-name", "198.51.100.9"])
def test_rank_0_listens_everywhere_if_its_name_has_no_usable_address(
    master: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The name resolves to 127.0.1.1, as a host's own name does on Debian; or the address is a
    proxy's."""
    real, port = socket.getaddrinfo, free_port()

    def resolved(host: str, *rest: object, **more: object) -> object:
        return real("127.0.1.1" if host == "our-name" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    served = []
    monkeypatch.setattr(rendezvous, "serve", lambda host, socket, **_: served.append(socket))
    rendezvous._listening_store(place(master, port, hosts=2), timedelta(seconds=5))
    (listening,) = served
    with listening:
        assert listeners(port) <= EVERYWHERE
    assert f"MASTER_ADDR={master} does not resolve to an address" in capfd.readouterr().err


def test_ranks_of_one_host_need_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "listen_at", lambda *asked: asked)
    monkeypatch.setattr(rendezvous, "serve", lambda _, asked, **more: asked)
    patience = timedelta(seconds=5)
    here = rendezvous._listening_store(place("node1", 1, "slurm"), patience)
    assert here == ("node1", 1, True)
    beyond = rendezvous._listening_store(place("node1", 1, "slurm", hosts=2), patience)
    assert beyond == ("node1", 1, False)


@pytest.mark.usefixtures("by_hand")
def test_taken_port_of_rank_0_names_its_key() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UserError, match=r"another launch\.master_port"),
    ):
        rendezvous.rendezvous(LaunchConfig(), None, place("127.0.0.1", taken.getsockname()[1]))


@pytest.mark.parametrize("agent", ["torchrun", "local"])
def test_a_restart_does_not_see_an_earlier_nccl_failure(
    agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts rank 1 first: it proceeds only after the key is gone."""
    listening = listen_here(0)
    port = listening.getsockname()[1]
    store = job_store.serve("127.0.0.1", listening)

    def start(number: int) -> Callable[[int], dist.Store]:
        environ = _rank_environment(port, 0, 2, number)
        if agent == "torchrun":
            environ = {name: environ[name] for name in AGENT}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        here = place("127.0.0.1", port, agent)
        return lambda rank: rendezvous.rendezvous(
            LaunchConfig(), None, dataclasses.replace(here, rank=rank)
        )

    meet = start(0)
    meet(0), meet(1)
    store.set("exception_dump", "1")  # the key of ProcessGroupNCCL, for the whole store
    assert meet(0).underlying_store.underlying_store.check(["exception_dump"])
    meet = start(1)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet, 1)
        with pytest.raises(TimeoutError):
            first.result(0.2)
        meet(0)
        first.result(30)
    assert not store.check(["exception_dump"])


def test_two_jobs_at_one_store_do_not_see_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    monkeypatch.setenv(SECRET, "ours")
    put(behind_secret(store), "parallel3d/run", {"run_dir": "runs/ours"})
    monkeypatch.setenv(SECRET, "theirs")
    assert not behind_secret(store).check(["parallel3d/run"])
    monkeypatch.setenv(SECRET, "ours")
    assert get(behind_secret(store), "parallel3d/run") == {"run_dir": "runs/ours"}


def test_entries_with_another_signature_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger who lists the keys still cannot write to the keys that ranks read."""
    monkeypatch.setenv(SECRET, "ours")
    store = dist.PrefixStore("attempt0", dist.HashStore())
    word = {"run": "mine", "run_dir": str(tmp_path), "device": "cpu"}
    monkeypatch.setenv(SECRET, "guessed")
    put(store, agreement.RUN_KEY, word)
    monkeypatch.setenv(SECRET, "ours")
    worker = Worker(1, 1, 2, 2, Path(), "slurm")
    second = RankAssignment("slurm", 1, 1, 2, 2, "localhost", 1, "7")
    with pytest.raises(ValueError, match="was not written by a rank of this job"):
        agreement.agree_on_run("train", Config(dp=2), second, worker, store, "cpu")
    assert worker.run_dir == Path()
    # A valid message under another key is not accepted either.
    put(store, "parallel3d/another", word)
    store.set(agreement.RUN_KEY, store.get("parallel3d/another"))
    with pytest.raises(ValueError, match="was not written by a rank of this job"):
        agreement.agree_on_run("train", Config(dp=2), second, worker, store, "cpu")


@pytest.mark.usefixtures("by_hand")
def test_without_a_secret_ranks_meet_as_before(tmp_path: Path) -> None:
    store = dist.HashStore()

    def meet(rank: int) -> None:
        assign_rank(Config(dp=2), Worker(rank, rank, 2, 2, tmp_path, "slurm"), store, {}, "train")

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(meet, (1, 0))) == [None, None]
    assert (tmp_path / "placement.json").exists()


@pytest.mark.usefixtures("by_hand")
def test_a_refusal_before_the_store_exists_reaches_rank_0(tmp_path: Path) -> None:
    port = free_port()
    first = place("localhost", port, "torchrun")
    worker = Worker(0, 0, 2, 2, tmp_path, "torchrun")
    error = UserError("on host n2: no GPU")
    with ThreadPoolExecutor() as threads:
        telling = threads.submit(
            tell_rank_0, LaunchConfig(), None, dataclasses.replace(first, rank=1), error
        )
        with pytest.raises(RankZerosError, match="on host n2: no GPU"):
            assign_rank(
                Config(dp=2),
                worker,
                rendezvous.rendezvous(LaunchConfig(), None, first),
                {},
                "train",
            )
        telling.result(30)


@pytest.mark.usefixtures("by_hand")
def test_a_refusing_rank_does_not_wait_long_for_a_missing_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "TELL_S", 0.2)
    second = dataclasses.replace(place("localhost", free_port()), rank=1)
    tell_rank_0(LaunchConfig(), None, second, UserError("on host n2: no GPU"))


def test_listen_at_prefers_the_family_that_gloo_takes() -> None:
    listening = listen_at("localhost", 0)
    assert listening is not None and listening.family == socket.AF_INET
    listening.close()
