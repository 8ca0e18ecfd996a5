"""Removes the rights by which root reads and writes all files, whatever their mode."""

from __future__ import annotations

import ctypes
import struct

CAPABILITY_VERSION = 0x20080522  # in <linux/capability.h>, each set has two words


def give_up_capabilities() -> None:
    """Makes the modes of files apply to this process, even if it is root's; permanently.

    It stays the same user: another one could not enter root's home, where Python may be installed.
    """
    none = struct.pack("6I", *[0] * 6)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), none) != 0:
        raise OSError(ctypes.get_errno(), "capset")
