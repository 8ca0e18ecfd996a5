"""Frames and signs the messages between the guards of a start and its collector.

A message is one line: an HMAC-SHA256 by the job's secret, a space, and the JSON list [start,
sequence number, payload]. The signature also covers who speaks, so that nobody can send a guard's
beat back to it as an order. A message of another start, with a wrong signature, with a sequence
number that is not larger than the one before, or that is too long is refused.
"""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Iterator
from typing import Any, Literal

Speaker = Literal["guard", "collector"]
LONGEST = 1 << 14  # bytes of a line
# Made once: a collector reads and writes hundreds of messages at a time.
ENCODE = json.JSONEncoder(separators=(",", ":")).encode
DECODE = json.JSONDecoder().decode


class Refusal(Exception):
    """Raised for a message that must not be believed; its connection is closed."""


def signature(secret: bytes, speaker: Speaker, body: bytes) -> bytes:
    return hmac.digest(secret, b"%s\n%s" % (speaker.encode(), body), "sha256").hex().encode()


def message(secret: bytes, speaker: Speaker, start: int, number: int, payload: Any) -> bytes:
    """Returns the line that carries `payload`, a JSON value."""
    body = ENCODE([start, number, payload]).encode()
    return signature(secret, speaker, body) + b" " + body + b"\n"


def opened(secret: bytes, speaker: Speaker, start: int, line: bytes) -> tuple[int, dict[str, Any]]:
    """Returns the sequence number and the payload of a line. Raises Refusal."""
    signed, _, body = line.partition(b" ")
    if not hmac.compare_digest(signed, signature(secret, speaker, body)):
        raise Refusal("its signature is wrong")
    try:
        theirs, number, payload = DECODE(body.decode())
    except (ValueError, TypeError):
        raise Refusal("it is not a message") from None
    if not isinstance(number, int) or not isinstance(payload, dict):
        raise Refusal("it is not a message")
    if theirs != start:
        raise Refusal(f"it belongs to start {theirs}, and this is start {start}")
    return number, payload


class Lines:
    """Collects the bytes of a connection, and gives its lines; it never holds more than one."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, data: bytes) -> Iterator[bytes]:
        """Yields the lines that `data` completes. Raises Refusal if a line is too long."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            if len(line) > LONGEST:
                raise Refusal(f"it is longer than {LONGEST} bytes")
            yield line
        if len(self._rest) > LONGEST:
            raise Refusal(f"it is longer than {LONGEST} bytes")


def unsent(connection: socket.socket, out: bytes) -> bytes | None:
    """Sends what a connection takes without waiting; returns the rest, or None if it is broken."""
    try:
        return out[connection.send(out) :]
    except BlockingIOError:
        return out
    except OSError:
        return None
