"""Runs `parallel3d generate`: generates text from a run's newest good checkpoint.

Every layout draws the same tokens: logits agree up to rounding, and one rank draws for all, in
fp64, from random numbers that depend on the seed alone.
"""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from yaml import YAMLError

from parallel3d.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    list_checkpoints,
    reason,
)
from parallel3d.checkpoint.planners import Chunk, TensorChunks
from parallel3d.checkpoint.storage import read_state
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.checkpoint.listing import find_checkpoint, find_run, run_names
from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config, GenerateConfig
from parallel3d.config.sections import in_other_precision
from parallel3d.data.corpus import check_vocabulary
from parallel3d.data.tokenizer import BYTE, FOLDER, decoding_of, open_tokenizer, tokenizer_of
from parallel3d.errors import UserError, print_line
from parallel3d.host.devices import choose_device
from parallel3d.models.transformer import Decoder, Stage, blank_stage
from parallel3d.parameters.sharding import spec_of
from parallel3d.run.configs import CONFIG_FILE, last_config
from parallel3d.run.launch import Worker
from parallel3d.run.worker import run_here


def generate(config: Config, worker: Worker) -> None:
    """Writes the prompt and its continuation to stdout; torch.distributed must be initialised.

    Raises UserError if no checkpoint of the run is complete.
    """
    worker.phase = "making process groups"
    groups = ProcessGroups.of_run(config, worker.device, worker.placement)
    device = torch.device(worker.device)
    worker.phase = "loading the checkpoint"
    stage = blank_stage(config, groups, device)
    manifest = load_newest(config, stage, groups)
    if worker.rank == 0:
        print_line(f"run={config.run}, step {manifest.step}, seed={config.seed}")
    worker.phase = "generating"
    tokenizer = open_tokenizer(config.data.tokenizer or BYTE)
    decoding = decoding_of(tokenizer)
    prompt = os.fsencode(config.prompt)  # as it was typed, whatever its bytes
    out = TextStream() if worker.rank == 0 else None
    if out is not None:
        out.write(decoding.begin(prompt))
    decoder, sampler = Decoder(config, groups, stage), TokenSampler(config.generate, config.seed)
    tokens = [*tokenizer.begin, *tokenizer.encode_prompt(prompt)]
    for _ in range(config.generate.max_tokens):
        logits = decoder.logits(tokens)
        token = torch.zeros((), dtype=torch.int64, device=device)
        if groups.is_last_stage and groups.tp.index == 0:
            assert logits is not None  # the last stage has them
            token += sampler.draw(logits[: tokenizer.vocab_size])
        if groups.world.size > 1:
            dist.broadcast(token, src=groups.world.size - groups.tp.size)
        tokens.append(int(token))
        if tokens[-1] in tokenizer.ends:
            break
        if out is not None:
            out.write(decoding.add(tokens[-1]))
    if out is not None:
        out.write(decoding.end())
        out.close()
    groups.close()


def load_newest(config: Config, stage: Stage, groups: ProcessGroups) -> Manifest:
    """Fills `stage` from the newest checkpoint that every rank finds complete; collective.

    Damaged ones are logged and skipped. Raises UserError if none is left.
    """
    state = state_of(stage)
    folders = checkpoints_of(config)
    for folder in folders:
        manifest, damage = _try_to_read(folder, state)
        whole = torch.tensor(int(manifest is not None), device=next(stage.parameters()).device)
        if groups.world.size > 1:
            dist.all_reduce(whole, op=dist.ReduceOp.MIN)
        if whole:
            assert manifest is not None
            return manifest
        if damage:
            print_line(f"{damage}; passing it over")
    raise UserError(f"run={config.run} has no checkpoint that is whole ({len(folders)} tried)")


def _try_to_read(folder: Path, state: dict[str, TensorChunks]) -> tuple[Manifest | None, str]:
    try:
        return read_state(folder, state), ""
    except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
        return None, str(problem)


def state_of(stage: Stage) -> dict[str, TensorChunks]:
    """Returns the chunks of a stage's parameters, to be filled in place."""
    state: dict[str, TensorChunks] = {}
    for parameter in stage.parameters():
        for shard in spec_of(parameter).shards:
            tensor = state.setdefault(
                f"parameter/{shard.name}", TensorChunks(shard.full_shape, parameter.dtype)
            )
            chunk = Chunk(shard.start, shard.shape)
            tensor.chunks.append((chunk, shard.of_local(parameter.detach())))
    return state


class TokenSampler:
    """Draws tokens from logits; the n-th draw depends on the seed and on n alone."""

    def __init__(self, settings: GenerateConfig, seed: int) -> None:
        self.settings = settings
        self.stream = torch.Generator().manual_seed(seed)

    def draw(self, logits: Tensor) -> int:
        """Draws a token of logits (tokens,) from softmax(logits / temperature) over the top_k.

        The token is where the cumulated probabilities exceed a uniform number, in fp64: logits that
        differ by rounding give the same token, unless the number falls between the two.
        """
        wide = logits.to("cpu", torch.float64)
        number = torch.rand((), dtype=torch.float64, generator=self.stream)
        if self.settings.temperature == 0:
            return int(wide.argmax())
        top_k = min(self.settings.top_k or len(wide), len(wide))
        kept = wide.topk(top_k).indices.sort().values  # in the vocabulary's order
        chances = torch.softmax(wide[kept] / self.settings.temperature, 0).cumsum(0)
        place = int(torch.searchsorted(chances, number * chances[-1], right=True))
        return int(kept[min(place, top_k - 1)])


class TextStream:
    """Writes text to stdout at once."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self.last = "\n"

    def write(self, text: str) -> None:
        """Prints and flushes the text."""
        if not text:
            return
        self.last = text[-1]
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        """Ends the last line."""
        if self.last != "\n":
            self.write("\n")


GENERATE = "generate"
# All other keys are given by the run.
MAY_BE_SET = ("run", "runs_dir", "prompt", "tp", "pp", "device", "seed", "generate.*", "launch.*")


def take_prompt(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns the overrides without prompt=…, and the prompt exactly as it was typed.

    Hydra would require quotes around most texts, and strip blanks.
    """
    prompts = [word.removeprefix("prompt=") for word in words if word.startswith("prompt=")]
    rest = [word for word in words if not word.startswith("prompt=")]
    return rest, prompts[-1] if prompts else None


def start_generate(config: Config, overrides: Sequence[str], prompt: str | None) -> int:
    """Generates with this process as the launcher. Returns the exit code.

    Args:
        overrides: without the prompt.
        prompt: None: the configuration's.

    Raises:
        UserError: no such run, no checkpoint, or a key that only training may set.
    """
    _check_overrides(overrides)
    config = config_of_run(config)
    checkpoints_of(config)
    world_size = config.tp * config.pp
    device = choose_device(config.device, world_size)
    if prompt is not None:
        config = dataclasses.replace(config, prompt=prompt)
    # Failures go to a folder of their own: generate adds nothing to the run.
    folder = Path(tempfile.mkdtemp(prefix="parallel3d-generate-"))
    code = None
    try:
        code = run_here(GENERATE, config, folder, world_size, device)
    finally:
        if code != 1:  # else it holds the failure's traceback
            shutil.rmtree(folder, ignore_errors=True)
    return code


def _check_overrides(overrides: Sequence[str]) -> None:
    for word in overrides:
        key = word.partition("=")[0].lstrip("+~")
        section = f"{key.partition('.')[0]}.*"
        if key not in MAY_BE_SET and section not in MAY_BE_SET:
            raise UserError(
                f"{word}: generate takes {key} from the run; what may be set is "
                f"{', '.join(MAY_BE_SET)}"
            )


def config_of_run(config: Config) -> Config:
    """Returns `config` (layout, device, seed, generate.*) with the model and tokenizer of its run.

    Checked, with dp=1. Raises UserError if there is no such run.
    """
    run = load_config_of(config)
    precision = "fp64" if run.precision.name == "fp64" else "fp32"
    config = dataclasses.replace(
        config,
        dp=1,
        model=run.model,
        attention_kernel=in_other_precision(run.attention_kernel),
        data=dataclasses.replace(config.data, tokenizer=_tokenizer(config, run)),
        precision=dataclasses.replace(config.precision, name=precision),
    )
    return check_config(config, own_samples=True)


def _tokenizer(config: Config, run: Config) -> str:
    """Returns the run's tokenizer, by a name that ranks elsewhere can open. Raises UserError."""
    own = Path(config.runs_dir, str(config.run), FOLDER)
    tokenizer = tokenizer_of(run.data, own.parent)
    check_vocabulary(tokenizer.vocab_size, run.model.vocab_size, tokenizer.name)
    return str(own.absolute()) if own.is_dir() else tokenizer.name


def load_config_of(config: Config) -> Config:
    """Returns the configuration of the run that `config` names. Raises UserError if none."""
    runs = Path(config.runs_dir)
    if config.run is None:
        known = run_names(runs)
        there = f"for example run={known[-1]}" if known else f"and {runs} has none yet"
        raise UserError(f"generate needs run=…, the name of a run, {there}")
    try:
        return last_config(find_run(runs, config.run))
    except (OmegaConfBaseException, YAMLError, OSError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"run={config.run}: its {CONFIG_FILE} cannot be read ({reason})") from None


def checkpoints_of(config: Config) -> list[Path]:
    """Returns the run's usable checkpoints, newest first. Raises UserError if there are none."""
    run_dir = Path(config.runs_dir) / str(config.run)
    try:
        folders = list_checkpoints(run_dir)
        if folders and config.generate.step is not None:
            return [find_checkpoint(run_dir.parent, run_dir.name, config.generate.step)]
    except OSError as error:
        raise UserError(
            f"run={config.run}: its checkpoints in {run_dir} cannot be listed ({reason(error)})"
        ) from None
    if not folders:
        raise UserError(
            f"run={config.run} has no checkpoint in {run_dir}: train it with checkpoint.every=…"
        )
    return folders
