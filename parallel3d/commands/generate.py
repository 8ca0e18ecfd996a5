"""Generates text from a checkpoint of a run, on every rank of `parallel3d generate`.

All layouts draw the same tokens, because their logits agree up to rounding. One rank draws for all
ranks, in fp64 and with random numbers that depend only on the seed.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.build import groups_of_run
from parallel3d.checkpoint.manifest import KINDS, DamagedCheckpoint, Manifest, UnreadableCheckpoint
from parallel3d.checkpoint.storage import TensorChunks, read_state
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.from_run import checkpoints_of
from parallel3d.commands.options import CommandConfig, EvalConfig, GenerateConfig
from parallel3d.data.tokenizer import BYTE, Decoding, begun, check_tokens, open_tokenizer
from parallel3d.errors import UserError, print_line
from parallel3d.experts.router import Router
from parallel3d.models.decoding import Decoder, blank_stage
from parallel3d.models.keys import ModelConfig
from parallel3d.models.rotary import length_with_short_factors
from parallel3d.models.transformer import Stage
from parallel3d.parameters.segments import Chunk
from parallel3d.parameters.slices import STATE
from parallel3d.parameters.state import spec_of
from parallel3d.resolve import blueprint_of
from parallel3d.run.launch import Worker


def generate(config: CommandConfig, worker: Worker) -> None:
    """Writes the prompt and its continuation to stdout.

    Raises UserError if the run has no checkpoint that can be loaded.
    """
    worker.phase = "making process groups"
    groups = groups_of_run(config, worker.device, worker.placement)
    device = torch.device(worker.device)
    worker.phase = "loading the checkpoint"
    stage = blank_stage(blueprint_of(config), groups, device)
    manifest = load_newest(Path(config.runs_dir, str(config.run)), config.generate, stage, groups)
    if worker.rank == 0:
        weights = ", weights=ema" if config.generate.weights == "ema" else ""
        print_line(f"run={config.run}, step {manifest.step}{weights}, seed={config.seed}")
    worker.phase = "generating"
    tokenizer = open_tokenizer(config.data.tokenizer or BYTE)
    decoding = Decoding(tokenizer)
    prompt = os.fsencode(config.prompt)  # restores exactly the bytes of the command line
    tokens = begun(tokenizer.encode_prompt(prompt), tokenizer.begin)
    check_tokens(tokens, tokenizer, config.model.vocab_size, "prompt")
    check_length(config.model, len(tokens), config.generate.max_tokens)
    speaks, last = worker.rank == 0, "\n"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

    def write(text: str) -> None:
        nonlocal last
        last = text[-1:] or last
        print(text, end="", flush=True)

    if speaks:
        write(decoding.begin(prompt))
    decoder = Decoder(config.model, groups, stage)
    sampler = TokenSampler(config.generate, config.seed)
    for _ in range(config.generate.max_tokens):
        logits = decoder.logits(tokens)
        token = torch.zeros((), dtype=torch.int64, device=device)
        if groups.is_last_stage and groups.tp.index == 0:
            assert logits is not None  # the last stage has logits
            token += sampler.draw(logits[: tokenizer.vocab_size])
        if groups.world.size > 1:
            dist.broadcast(token, src=groups.world.size - groups.tp.size)
        tokens.append(int(token))
        if tokens[-1] in tokenizer.ends:
            break
        if speaks:
            write(decoding.add(tokens[-1]))
    if speaks:
        write(decoding.end())
        write("" if last == "\n" else "\n")
    groups.close()


def check_length(model: ModelConfig, prompt: int, more: int) -> None:
    """Raises UserError if a text of `prompt` + `more` tokens needs factors that the run lacks.

    These are LongRoPE's long factors, in a run whose sequences are all short.
    """
    most = length_with_short_factors(model)
    if most is None or prompt + more - 1 <= most:
        return
    allowed = most - prompt + 1
    close = "give a shorter prompt"
    if allowed > 0:
        close = f"the nearest is generate.max_tokens={allowed}"
    raise UserError(
        f"generate.max_tokens={more} after {prompt:,} tokens of the prompt needs LongRoPE's long "
        f"factors, but with model.seq_length={model.seq_length} the run only has the short ones, "
        f"for up to {most:,} tokens; {close}, or import the model with a longer model.seq_length"
    )


def load_newest(
    run_dir: Path, keys: GenerateConfig | EvalConfig, stage: Stage, groups: ProcessGroups
) -> Manifest:
    """Fills `stage` from the newest intact checkpoint, or from the one at `keys.step`.

    Returns the manifest of the checkpoint. Raises UserError if no checkpoint is intact. The call is
    collective.
    """
    state = state_of(stage, keys.weights)
    folders = checkpoints_of(run_dir, keys)
    for folder in folders:
        manifest = None
        try:
            manifest = read_state(folder, state)
        except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
            print_line(f"{problem}; skipping it")
        whole = torch.tensor(int(manifest is not None), device=next(stage.parameters()).device)
        if groups.world.size > 1:
            dist.all_reduce(whole, op=dist.ReduceOp.MIN)
        if whole:
            assert manifest is not None
            return manifest
    raise UserError(f"run={run_dir.name} has no intact checkpoint ({len(folders)} tried)")


def state_of(stage: Stage, weights: str = "model") -> dict[str, TensorChunks]:
    """Returns the tensors of a stage by their names in a checkpoint, to be filled in place.

    These are the parameters and the biases of routers. `weights` is a key of `KINDS`: the model's
    own weights, or their moving average.
    """
    state: dict[str, TensorChunks] = {}
    for parameter in stage.parameters():
        for shard in spec_of(parameter).shards:
            tensor = state.setdefault(
                f"{KINDS[weights]}/{shard.name}", TensorChunks(shard.full_shape, parameter.dtype)
            )
            chunk = Chunk(shard.start, shard.shape)
            tensor.chunks.append((chunk, shard.of_local(parameter.detach())))
    for router in stage.modules():
        if isinstance(router, Router) and router.bias is not None:
            state[f"{STATE}/{router.name}.bias"] = TensorChunks.whole(router.bias)
    return state


class TokenSampler:
    """Draws tokens from logits; the seed and n determine the random number of the n-th draw."""

    def __init__(self, settings: GenerateConfig, seed: int) -> None:
        self.settings = settings
        self.stream = torch.Generator().manual_seed(seed)

    def draw(self, logits: Tensor) -> int:
        """Draws a token from softmax(logits / temperature) over the top_k likeliest tokens.

        `logits` has shape (tokens,). The result is the first token whose cumulative probability, in
        fp64, exceeds a uniform random number. Logits that differ only by rounding therefore give
        the same token, unless the random number falls between their cumulative probabilities.
        """
        wide = logits.to("cpu", torch.float64)
        number = torch.rand((), dtype=torch.float64, generator=self.stream)
        if self.settings.temperature == 0:
            return int(wide.argmax())
        top_k = min(self.settings.top_k or len(wide), len(wide))
        kept = wide.topk(top_k).indices.sort().values  # in the order of the vocabulary
        chances = torch.softmax(wide[kept] / self.settings.temperature, 0).cumsum(0)
        place = int(torch.searchsorted(chances, number * chances[-1], right=True))
        return int(kept[min(place, top_k - 1)])
