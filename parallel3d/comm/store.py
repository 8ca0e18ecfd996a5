"""The store in which the ranks of a job meet: where it listens, and whose words in it are believed.

torch's store asks nobody who he is: whoever reaches its port reads, lists and writes all keys. So
it listens on no more addresses than the ranks need, and where the job has a secret, the same on all
of its ranks (`PARALLEL3D_SECRET`; the launchers make one), what they tell each other stands behind
its digest and carries its seal. What torch itself keeps there, such as gloo's addresses, has none.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store, TCPStore


SECRET = "PARALLEL3D_SECRET"
LOCALHOST = "127.0.0.1"
DIGEST_BYTES = 32


def secret() -> bytes:
    """The job's secret; empty without one."""
    return os.environ.get(SECRET, "").encode()


def listen_at(host: str, port: int, loopback: bool = True) -> socket.socket | None:
    """A socket that listens on an address of `host`, on this one alone; port 0 takes a free one.

    None where the name leads to no address of this machine or, without `loopback`, to one that no
    other machine reaches (Debian has a host's own name lead to 127.0.1.1). Raises OSError if the
    port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in sorted(found, key=lambda f: f[0] != socket.AF_INET):
        if not loopback and is_loopback(address[0]):
            continue
        listening = socket.socket(family, kind, protocol)
        # As the store itself does: a port whose last user has just ended is free.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                raise
            continue  # an address of another machine: behind a proxy, or of another network
        listening.listen(socket.SOMAXCONN)
        return listening
    return None


def listen_everywhere(port: int) -> socket.socket:
    """A socket that listens on all addresses of this host. Raises OSError if the port is taken."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_loopback(host: str) -> bool:
    """Whether `host` is written as this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def one_host_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep what ranks of one host alone send to its loopback.

    gloo would listen on the address of the host's name, or on that of an interface that is meant
    for runs on several hosts; NCCL on the first one of the network, unless the user names one.
    """
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if interface is None:
        return {}
    nccl = environ.get("NCCL_SOCKET_IFNAME", f"={interface}")
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": nccl}


def serve(host: str, listening: socket.socket, **more: Any) -> TCPStore:
    """A store on a listening socket, which becomes its own; `more` as for TCPStore."""
    from torch.distributed import TCPStore

    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        **more,
    )


def behind_secret(store: Store) -> PrefixStore:
    """The same store for those who know the job's secret: a port that two jobs share tells neither
    of the other. Keys can be listed, so it is a digest that they stand behind.
    """
    from torch.distributed import PrefixStore

    return PrefixStore(hashlib.sha256(secret()).hexdigest()[:16], store)


def sign(key: str, word: bytes) -> bytes:
    """A word under the seal of the job's secret, to be kept under `key`."""
    return _digest(key, word) + word


def verify(key: str, sealed: bytes) -> bytes:
    """The word again. Raises ValueError if none of this job's ranks has put it under `key`."""
    digest, word = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(key, word)):
        raise ValueError(f"{key} in the ranks' store was not written by a rank of this job")
    return word


def put(store: Store, key: str, value: Any) -> None:
    """Tells the other ranks a value that JSON has."""
    store.set(key, sign(key, json.dumps(value).encode()))


def get(store: Store, key: str) -> Any:
    """What a rank of this job has put there; waits for it. Raises ValueError as `unseal`."""
    return json.loads(verify(key, store.get(key)))


def get_all(store: Store, keys: Sequence[str]) -> list[Any]:
    """The same of several keys, in one request."""
    said = zip(keys, store.multi_get(keys), strict=True)
    return [json.loads(verify(key, sealed)) for key, sealed in said]


def _digest(key: str, word: bytes) -> bytes:
    return hmac.digest(secret(), key.encode() + b" " + word, "sha256")
