"""Proof of an import: our logits beside those of transformers, for the same tokens, in fp32."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.comm.group import SINGLE
from parallel3d.config.schema import ModelConfig
from parallel3d.errors import UserError
from parallel3d.files.reading import plain
from parallel3d.models.context import BuildContext
from parallel3d.models.decoder import Blank
from parallel3d.models.transformer import Stage
from parallel3d.sizes.flops import parameter_count

TRANSFORMERS = "transformers"
OLDEST = 5  # before it, a tied head that differs was dropped, and other keys were read
LONGEST = 256  # tokens
# Of the largest logit. Two ways to compute the same in fp32 differ by some 1e-6, the nearest two
# models that are not the same (gelu and its tanh) by some 1e-3.
TOLERANCE = 1e-4
MEMINFO = Path("/proc/meminfo")


def why_not(model: ModelConfig) -> str | None:
    """What keeps an import from being proven on this machine; None if nothing does."""
    try:
        # A package that was found and is not installed is somebody's folder of that name.
        found = importlib.util.find_spec(TRANSFORMERS) and version(TRANSFORMERS)
    except (PackageNotFoundError, ValueError):
        found = None
    if not found:
        return "transformers is not installed (pip install transformers)"
    major = found.partition(".")[0]
    if major.isdigit() and int(major) < OLDEST:
        return f"transformers {found} is older than {OLDEST}"
    needed = 2 * 4 * parameter_count(model) + 3 * 4 * LONGEST * model.vocab_size
    free = _available_memory()
    if free is not None and needed > free:
        return f"it would take {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    return None


def _available_memory() -> int | None:
    """Bytes that programs can still have; None where the system does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def some_tokens(model: ModelConfig) -> Tensor:
    """(1, s) tokens, at random but always the same."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, min(LONGEST, model.seq_length))
    return torch.randint(0, model.vocab_size, shape, generator=generator)


def blank_model(model: ModelConfig, dtype: torch.dtype = torch.float32) -> Stage:
    """The whole model on one rank, all zero, for the positions that the proof looks at."""
    model = dataclasses.replace(model, seq_length=min(LONGEST, model.seq_length), dropout=0.0)
    context = BuildContext(Blank(0, dtype, torch.device("cpu")), SINGLE, sp=False)
    return Stage(model, range(model.num_layers), True, True, context)


@torch.no_grad()
def our_logits(stage: Stage, model: ModelConfig, tokens: Tensor) -> Tensor:
    """(b, s, vocab_size) of a whole model on one rank."""
    x = stage.embedding(tokens)
    for block in stage.layers.values():
        x = block(x, stage.rotary)
    return stage.head.logits(x)[..., : model.vocab_size]


def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    """(b, s, vocab_size) of transformers' model of the folder.

    Raises UserError if transformers does not load or run it, or to no finite numbers.
    """
    import transformers

    logging = transformers.utils.logging
    verbosity, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                use_safetensors=True,  # nothing is unpickled
                trust_remote_code=False,
                local_files_only=True,
            )
            logits = theirs.eval()(tokens, use_cache=False, return_dict=True).logits
            if not logits.isfinite().all():
                raise ValueError("its logits are no finite numbers")
            return logits
    except Exception as error:  # of any kind: what a folder holds may break it anywhere
        text = str(error).strip() or type(error).__name__
        raise UserError(
            f"from={folder}: transformers {version(TRANSFORMERS)} does not load or run it "
            f"({plain(' '.join(text.split()))}); prove=false imports it unproven"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
        if shows:
            logging.enable_progress_bar()


def compare(folder: Path, ours: Tensor, theirs: Tensor) -> str:
    """Say how near the logits are. Raises UserError if they are not the same but for rounding."""
    difference = float((ours.float() - theirs).abs().max())
    largest = float(theirs.abs().max())
    count, name = theirs.shape[:-1].numel(), f"transformers {version(TRANSFORMERS)}"
    if not difference <= TOLERANCE * largest:  # NaN too
        raise UserError(
            f"from={folder}: the logits of {count} tokens differ from those of {name} by up to "
            f"{difference:.3g}, of {largest:.3g} at the most: nothing is imported; "
            "prove=false imports it unproven"
        )
    return (
        f"proven: the logits of {count} tokens are those of {name} to {difference:.1e}, of "
        f"{largest:.3g} at the most"
    )
