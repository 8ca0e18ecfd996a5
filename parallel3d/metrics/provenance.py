"""Finds the versions, the git commit and the host of a run."""

from __future__ import annotations

import socket
import subprocess
from importlib import metadata
from pathlib import Path

GIT_TIMEOUT_S = 5.0


def provenance() -> dict[str, str | None]:
    """Returns the versions, commit and host of a run, without paths, user names or addresses."""
    return {
        "parallel3d": version_of("parallel3d"),  # None if a checkout is used through PYTHONPATH
        "git_commit": git_commit(Path(__file__).resolve()),
        "torch": version_of("torch"),
        "hostname": socket.gethostname(),
    }


def git_commit(file: Path) -> str | None:
    """Returns the commit of the checkout that tracks `file`, with "-dirty" if it has changes.

    Returns None without git, outside a checkout, or if `file` is not tracked: a package that is
    installed inside another repository must not report that repository's commit.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of a git command; None if it fails, is missing or takes too long."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def versions() -> dict[str, str]:
    found = {package: version_of(package) for package in ("torch", "parallel3d")}
    return {package: version or "source" for package, version in found.items()}


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
