"""Tests that 300 bad configurations are refused with the same keys, values and remedies as in
earlier versions. `refusals.json` has them, with the settings that an earlier sentence named. The
words may change, but no key, value or nearest choice may disappear.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.fields import with_values
from parallel3d.errors import UserError
from parallel3d.run_config import Config, check_config

ROWS = json.loads(Path(__file__).with_name("refusals.json").read_text(encoding="utf-8"))
BASE = {"micro_batch_size": 1, "global_batch_size": 8, "model.seq_length": 16, "train.steps": 4}


def refusal(values: dict[str, Any], world_size: int | None) -> str:
    """Returns the sentence that refuses a configuration."""
    with pytest.raises(UserError) as refused:
        config = with_values(Config(), BASE | values)
        sizes = [getattr(config, size) or 1 for size in ("tp", "pp", "cp", "dp")]
        check_config(config, world_size or math.prod(sizes))
    return str(refused.value)


@pytest.mark.slow
def test_every_refusal_names_its_settings() -> None:
    silent = {}
    for row in ROWS:
        said = refusal(row["values"], row["world"])
        if missing := [each for each in row["told"] if each not in said]:
            silent[said] = missing
    assert silent == {}
    assert len(ROWS) > 250
