"""Makes dry runs in a process of their own: the simulated device is enabled once and for all
there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from parallel3d.run_config import Config
from tests.e2e.ready import run_code

SCRIPT = """
import json, sys
from omegaconf import OmegaConf
from parallel3d.commands.dry_ranks import find_facts
from parallel3d.commands.options import CommandConfig

for keys in json.loads(sys.argv[1]):
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CommandConfig), keys))
    print(json.dumps(find_facts(config, config.dryrun.rank)), flush=True)
"""


def dry_runs(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """Returns `find_facts` of each."""
    done = run_code(SCRIPT, json.dumps([dataclasses.asdict(config) for config in configs]))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
