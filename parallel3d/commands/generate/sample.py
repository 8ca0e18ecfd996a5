"""`parallel3d generate`: text from a run's newest good checkpoint, on one rank.

Every layout draws the same tokens: logits agree but for rounding, and one rank draws for all, in
fp64, from a stream of random numbers that depends on the seed alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.checkpoint.boxes import Box, LogicalTensor
from parallel3d.checkpoint.manifest import DamagedCheckpoint, Manifest, UnreadableCheckpoint
from parallel3d.checkpoint.storage import read_state
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.generate.start import checkpoints_of
from parallel3d.config.schema import Config, GenerateConfig
from parallel3d.data.text.decoding import decoding_of
from parallel3d.data.tokenizer import BYTE, open_tokenizer
from parallel3d.errors import UserError, print_line
from parallel3d.models.decoder import Decoder, blank_stage
from parallel3d.models.transformer import Stage
from parallel3d.run.launch import Worker


def generate(config: Config, worker: Worker) -> None:
    """Writes the prompt and what follows it to stdout; torch.distributed is initialised.

    Raises UserError if no checkpoint of the run is whole.
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
    """Fill `stage` from the newest checkpoint that every rank finds whole; collective.

    Damaged ones are said and passed over. Raises UserError if none is left.
    """
    state = state_of(stage)
    folders = checkpoints_of(config)
    for folder in folders:
        manifest, damage = _try_to_read(folder, state)
        whole = torch.tensor(int(manifest is not None), device=next(stage.parameters()).device)
        if groups.world.size > 1:
            dist.all_reduce(whole, op=dist.ReduceOp.MIN)
        if whole:
            return manifest
        if damage:
            print_line(f"{damage}; passing it over")
    raise UserError(f"run={config.run} has no checkpoint that is whole ({len(folders)} tried)")


def _try_to_read(folder: Path, state: dict[str, LogicalTensor]) -> tuple[Manifest | None, str]:
    try:
        return read_state(folder, state), ""
    except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
        return None, str(problem)


def state_of(stage: Stage) -> dict[str, LogicalTensor]:
    """What a stage wants of a checkpoint: the boxes of its parameters, to be filled in place."""
    state: dict[str, LogicalTensor] = {}
    for parameter in stage.parameters():
        for piece in parameter.spec.pieces:
            tensor = state.setdefault(
                f"parameter/{piece.name}", LogicalTensor(piece.full_shape, parameter.dtype)
            )
            box = Box(piece.start, piece.shape)
            tensor.boxes.append((box, piece.of_local(parameter.detach())))
    return state


class TokenSampler:
    """Draws tokens from logits; the n-th draw depends on the seed and on n alone."""

    def __init__(self, settings: GenerateConfig, seed: int) -> None:
        self.settings = settings
        self.stream = torch.Generator().manual_seed(seed)

    def draw(self, logits: Tensor) -> int:
        """One token of logits (tokens,): softmax(logits / temperature) over the likeliest top_k.

        The token is where the cumulated probabilities pass a uniform number, in fp64: logits that
        differ by rounding give the same token, but for a number that falls between the two.
        """
        wide = logits.to("cpu", torch.float64)
        number = torch.rand((), dtype=torch.float64, generator=self.stream)
        if self.settings.temperature == 0:
            return int(wide.argmax())
        top_k = min(self.settings.top_k or len(wide), len(wide))
        kept = wide.topk(top_k).indices.sort().values  # in the vocabulary's order, whatever ranks
        chances = torch.softmax(wide[kept] / self.settings.temperature, 0).cumsum(0)
        place = int(torch.searchsorted(chances, number * chances[-1], right=True))
        return int(kept[min(place, top_k - 1)])


class TextStream:
    """Text to stdout as it comes."""

    def __init__(self) -> None:
        sys.stdout.reconfigure(errors="replace")
        self.last = "\n"

    def write(self, text: str) -> None:
        """Prints it at once."""
        if not text:
            return
        self.last = text[-1]
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        """Ends the last line."""
        if self.last != "\n":
            self.write("\n")
