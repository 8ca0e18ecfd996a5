"""Tests that only one module asks for the kind of device, and that it uses no name that torch.cuda
lacks."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import create_autospec, patch

import pytest
import torch

import parallel3d
from parallel3d.device import accelerator

PACKAGE = Path(parallel3d.__file__).parent
# ROCm has no driver library that could be asked more cheaply, so its build of torch counts and
# describes the GPUs.
ALLOWED = {
    "host/gpus.py": {
        "if torch is not None and torch.cuda.is_initialized():",
        "for index in range(torch.cuda.device_count()):",
        "facts: Any = torch.cuda.get_device_properties(index)",
    }
}
LITERAL = re.compile(r"torch\.cuda\.|\.is_cuda|\.type == .cuda|startswith\(.cuda|\.cuda\(")


def test_no_other_module_asks_for_cuda() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for line in path.read_text(encoding="utf-8").splitlines():
            code = line.split("#")[0].strip()
            is_prose = code.startswith(('"', "`")) or "`" in code
            if LITERAL.search(code) and not is_prose and code not in ALLOWED.get(name, ()):
                found.append(f"{name}: {code}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", ["cuda:1", "cuda"])
def test_the_accelerator_module_only_calls_existing_functions_of_torch_cuda(word: str) -> None:
    """Refuses names that torch.cuda lacks, and arguments that it does not take."""
    cuda, device = create_autospec(torch.cuda), torch.device(word)
    cuda.get_device_name.return_value = "H100"
    with patch.object(torch, "get_device_module", lambda _: cuda):
        accelerator.make_current(device)
        accelerator.synchronize(device)
        assert accelerator.name(device) == "H100"
    cuda.set_device.assert_called_once_with(device)
    cuda.synchronize.assert_called_once_with(device)


def test_a_cpu_is_not_an_accelerator() -> None:
    for word in ("cpu", "meta"):
        device = torch.device(word)
        assert not accelerator.is_accelerator(device)
        accelerator.make_current(device)
        accelerator.synchronize(device)
    assert accelerator.is_accelerator(torch.device("xpu", 0))


def test_numbers_on_the_host_are_read_as_they_are() -> None:
    assert accelerator.Reading(torch.tensor([3, 1, 2])).values() == [3, 1, 2]
