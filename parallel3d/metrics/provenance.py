"""Which code ran, and where: versions, git commit, host."""

from __future__ import annotations

import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

GIT_TIMEOUT_S = 5.0


class Provenance(NamedTuple):
    """What is needed to find a run's code again. Holds no path, user name or remote address."""

    parallel3d: str | None  # version; None if not installed (run from a checkout by PYTHONPATH)
    git_commit: str | None  # "-dirty" is appended if tracked files differ; None outside a checkout
    torch: str | None
    hostname: str

    @classmethod
    def collect(cls) -> Provenance:
        """Ask the package metadata, git and the host. Takes some milliseconds."""
        return cls(
            parallel3d=version_of("parallel3d"),
            git_commit=git_commit(Path(__file__).resolve()),
            torch=version_of("torch"),
            hostname=socket.gethostname(),
        )


def git_commit(file: Path) -> str | None:
    """The commit of the checkout that tracks `file`, with "-dirty" if tracked files have changed.

    None without git, outside a checkout, or if `file` is not tracked: a package installed into a
    virtual environment inside someone else's repository must not claim that repository's commit.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    changed = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if there is no git, it fails, or a slow disk delays it."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def versions() -> dict[str, str]:
    """What a checkpoint keeps of them."""
    found = {package: version_of(package) for package in ("torch", "parallel3d")}
    return {package: version or "source" for package, version in found.items()}


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
