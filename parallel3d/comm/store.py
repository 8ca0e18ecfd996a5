"""Opens the store of a job, and signs and verifies the values in it.

torch's store has no authentication: anyone who reaches its port can read, list and write all
keys. Therefore it listens on no more addresses than the ranks need. If the job has a secret, which
is the same on all ranks (`PARALLEL3D_SECRET`; the launchers generate one), the digest of the secret
is the prefix of all keys, and values are signed. Entries that torch itself makes, such as gloo's
addresses, are not signed.
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
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store, TCPStore


SECRET = "PARALLEL3D_SECRET"
LOCALHOST = "127.0.0.1"
DIGEST_BYTES = 32


def secret() -> bytes:
    """Returns the job's secret, which is empty if there is none."""
    return os.environ.get(SECRET, "").encode()


def listen_at(host: str, port: int, loopback: bool = True) -> socket.socket | None:
    """Returns a socket that listens on one address of `host`; port 0 means any free port.

    Returns None if the name resolves to no address of this machine or, without `loopback`, only to
    loopback (Debian resolves a host's own name to 127.0.1.1). Raises OSError if the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, *_, address in sorted(found, key=lambda f: f[0] != socket.AF_INET):
        if not loopback and is_loopback(str(address[0])):
            continue
        try:
            return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
        except OSError as error:  # any other error: the address is not this machine's
            if error.errno == errno.EADDRINUSE:
                raise
    return None


def listen_everywhere(port: int) -> socket.socket:
    """Returns a socket that listens on all addresses. Raises OSError if the port is taken."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_loopback(host: str) -> bool:
    """Returns whether `host` names this machine's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def one_host_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables that keep one host's traffic on its loopback interface."""
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if interface is None:
        return {}
    nccl = environ.get("NCCL_SOCKET_IFNAME", f"={interface}")
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": nccl}


def serve(host: str, listening: socket.socket, **more: Any) -> TCPStore:
    """Returns a store that takes over a listening socket.

    `more` has further arguments of TCPStore.
    """
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
    """Returns a store that prefixes all keys with a digest of the job's secret.

    Thus two jobs that use the same port do not read each other's keys.
    """
    from torch.distributed import PrefixStore

    return PrefixStore(hashlib.sha256(secret()).hexdigest()[:16], store)


def put(store: Store, key: str, value: Any) -> None:
    """Stores `value` under `key` as JSON, compressed and signed with the job's secret."""
    message = zlib.compress(json.dumps(value).encode())
    store.set(key, _digest(key, message) + message)  # type: ignore[arg-type]  # its stub lacks bytes


def get(store: Store, key: str) -> Any:
    """Waits for the value of a key and returns it.

    Raises ValueError if the value was not put under `key` by a rank of this job.
    """
    return _verified(key, store.get(key))


def get_all(store: Store, keys: Sequence[str]) -> list[Any]:
    """Waits for the values of several keys and returns them, with one request to the store."""
    return list(map(_verified, keys, store.multi_get(list(keys))))


def _verified(key: str, signed: bytes) -> Any:
    digest, message = signed[:DIGEST_BYTES], signed[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(key, message)):
        raise ValueError(f"{key} in the ranks' store was not written by a rank of this job")
    return json.loads(zlib.decompress(message))


def _digest(key: str, message: bytes) -> bytes:
    return hmac.digest(secret(), key.encode() + b" " + message, "sha256")
