"""Every pair of settings trains on the pretended accelerator as the reference does.

The cases are those of `test_engines`, but for compiled ones, which have no device to be lowered
for. Beside the numbers: no access that nothing orders, no operation that the ranks do not call alike
(either raises), one wait of the host a step and none a micro-batch, and no context on a device that
is not the rank's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel3d.trainer import Trainer
from tests.distributed import harness
from tests.distributed.cases import Case
from tests.distributed.harness import Outcome, References, differences, run_cases
from tests.distributed.pretended import PretendedPool, here
from tests.distributed.test_engines import CASES
