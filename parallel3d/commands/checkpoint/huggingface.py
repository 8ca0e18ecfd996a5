"""Implements `parallel3d checkpoint export` and `import`, which convert Hugging Face folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.blueprint.parameters import parameter_count
from parallel3d.checkpoint.hf.config import TYPE, hf_kind
from parallel3d.checkpoint.hf.families import FAMILIES
from parallel3d.checkpoint.hf.folder import (
    HFFolder,
    check_layers,
    dequantized_weights,
    export_hf,
    keep_rest,
    read_hf_config,
    tensors_of,
)
from parallel3d.checkpoint.hf.kept import (
    read_kept,
    tokenizer_to_export,
    tokenizer_to_import,
    write_kept,
)
from parallel3d.checkpoint.hf.read_keys import listed
from parallel3d.checkpoint.hf.rope import unlike_before_5
from parallel3d.checkpoint.hf.their_code import check_unread
from parallel3d.checkpoint.init_from import keeping_biases, model_from, model_of
from parallel3d.checkpoint.manifest import CHECKPOINTS, KINDS, read_manifest, step_folder
from parallel3d.checkpoint.runs import (
    KEPT_FOLDER,
    check_ema,
    damage_refused,
    find_checkpoint,
    title,
)
from parallel3d.checkpoint.storage import TensorChunks, read_state, stored_shapes
from parallel3d.cli.overrides import composed
from parallel3d.commands.checkpoint.new_runs import new_run, save_first
from parallel3d.commands.checkpoint.proof import TRANSFORMERS, their_side, verdict, why_not
from parallel3d.commands.generate import state_of
from parallel3d.config.fields import spell
from parallel3d.data.tokenizer import (
    FOLDER,
    TOKENIZER,
    FileTokenizer,
    Roles,
    Tokenizer,
    converted,
)
from parallel3d.data.tokenizer_check import unlike_theirs
from parallel3d.device.precision import COMPUTE, master_dtype
from parallel3d.errors import UserError, print_line
from parallel3d.models.declared import full_shapes_of, states_of
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import refuse_own
from parallel3d.models.transformer import Stage
from parallel3d.parameters.slices import STATE
from parallel3d.run_config import Config, check_config
from parallel3d.versions import newer

BYTES = "its tokens are bytes, and token 256 ends texts"
NO_TOKENIZER = "without a tokenizer, like the folder that it was imported from"


def describe_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> str:
    if isinstance(tokenizer, FileTokenizer):
        return f"the run has the folder's tokenizer ({tokenizer.vocab_size:,} tokens)"
    if tokenizer is not None:
        return "the run's tokens are bytes"
    return (
        f"{folder} has no {TOKENIZER}: the run's tokens are bytes, unless data.tokenizer=… names "
        f"the tokenizer of the model{converted(folder)}"
    )


UNTIED = (
    "config.json ties the head to the embedding, but the files hold a different head, which is "
    "imported untied, as transformers 5 loads it"
)


def export_run(
    runs_dir: Path, run: str, to: Path, step: int | None, dtype: str | None, weights: str = "model"
) -> int:
    """Writes a checkpoint's model as a Hugging Face folder. Returns the exit code, 0.

    Args:
        runs_dir: the folder of all runs.
        run: the run with the checkpoint.
        to: the folder to create.
        step: the step of the checkpoint, or None for the newest.
        dtype: the type of the written weights, or None for that of the checkpoint (fp32 or fp64).
        weights: a key of `KINDS`, which is model, or ema for the average of the weights.

    Raises:
        UserError: if the checkpoint is missing or damaged, or if no format can express its model.
    """
    folder = find_checkpoint(runs_dir, run, step)
    where = title(folder)
    if weights == "ema":
        check_ema(folder, "weights")
    with damage_refused(where, "; parallel3d checkpoint ls shows the other checkpoints"):
        manifest = read_manifest(folder)
        model = model_of(manifest, where)
        refuse_own(model, f"checkpoint export run={run}")
        try:
            own = "fp64" if manifest.config["precision"]["name"] == "fp64" else "fp32"
        except (KeyError, TypeError) as error:
            unknown = "has no model that this version of parallel3d knows: its precision is missing"
            raise UserError(f"{where} {unknown} ({error!r})") from None
        check_layers(model, len(stored_shapes(folder)), where)
        tokenizer = tokenizer_to_export(manifest, runs_dir / run)
        about = NO_TOKENIZER if tokenizer is None else BYTES
        if isinstance(tokenizer, FileTokenizer):
            about = f"its tokenizer is {tokenizer.name}"
        others = runs_dir / run / KEPT_FOLDER
        shapes, states, wide = full_shapes_of(model), states_of(model), COMPUTE[own]

        def read(names: Iterable[str]) -> dict[str, Tensor]:
            full = {name: torch.empty(shapes[name], dtype=wide) for name in names}
            state = {
                f"{STATE if n in states else KINDS[weights]}/{n}": TensorChunks.whole(t)
                for n, t in full.items()
            }
            read_state(folder, state)
            return full

        kept = read_kept(runs_dir / run, tokenizer)
        files = export_hf(
            model,
            read,
            to.absolute(),
            dtype=dtype or own,
            end_of_text=None if tokenizer is None else tokenizer.eot,
            begin_of_text=None if tokenizer is None else tokenizer.begin[0],
            kept=kept,
            ends=tokenizer.all_ends if isinstance(tokenizer, FileTokenizer) else None,
            beside=_beside(tokenizer),
            others=others if others.is_dir() else None,
        )
    if sentence := unlike_before_5(model, FAMILIES[hf_kind(model, kept.get(TYPE))]):
        print_line(sentence)
    if isinstance(tokenizer, FileTokenizer):
        unlike = unlike_theirs(tokenizer, to)
        for sentence in (*tokenizer.doubts(), *([] if unlike is None else [unlike])):
            print_line(sentence)
    size = sum(path.stat().st_size for path in files)
    run = f"the average of {run}'s weights" if weights == "ema" else run
    print_line(f"{to}: step {manifest.step} of {run}, {len(files)} files, {size:,} bytes; {about}")
    return 0


def _beside(tokenizer: Tokenizer | None) -> dict[str, bytes]:
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.to_export()
    return {} if tokenizer is None else tokenizer.files()


def import_run(
    folder: Path, run: str, runs_dir: Path, overrides: list[str], prove: bool | None = None
) -> int:
    """Makes a run whose checkpoint of step 0 has the weights of a Hugging Face folder.

    The optimizer state is zero, as before a first step. All names, shapes and types are checked
    before the run's folder is made. A later failure removes this folder again. Returns the exit
    code, 0.

    Args:
        folder: the Hugging Face folder.
        run: the new run's name.
        runs_dir: the folder of all runs.
        overrides: keys of the new run's configuration.
        prove: whether to compare the logits of the run with those of transformers. None means
            that they are compared if that is possible on this machine.

    Raises:
        UserError: if the folder is incomplete or has an unknown model, if an override contradicts
            it, if the name is taken, or if the comparison fails or is requested but impossible.
    """
    source = read_hf_config(folder)
    config = _configuration(folder, run, runs_dir, source.keys, overrides)
    unproven = "prove=false compares no logits" if prove is False else why_not(config.model)
    if prove and unproven:
        raise UserError(f"prove=true: {unproven}")
    if unproven:
        remedy = "remove the keys from config.json if they have no effect"
        remedy += ", or leave prove=false out" if prove is False else ""
        check_unread(f"from={folder}", source.kind, source.unread, unproven, remedy)
    tokenizer = tokenizer_to_import(folder, config.data.tokenizer, config.model.vocab_size)
    dtype = master_dtype(config.precision)
    tensors = tensors_of(
        folder,
        config.model,
        source.kind,
        dtype=dtype,
        mtp=source.mtp,
        wrapped=source.wrapped,
        quantization=source.quantization,
    )
    first = next(tensors)  # the first tensor comes after all names, shapes and types were checked
    with new_run(config) as run_dir:
        if isinstance(tokenizer, FileTokenizer):
            roles = Roles(tuple(tokenizer.prefix), tuple(sorted(tokenizer.ends)))
            tokenizer.save(run_dir / FOLDER, roles)
        write_kept(run_dir, source.kept, tokenizer, own=config.data.tokenizer is None)
        keep_rest(folder, source, run_dir / KEPT_FOLDER)
        save_first(config, run_dir, chain([first], tensors), states_of(config.model))
        proof = f"not proven: {unproven}"
        if not unproven:
            proof = _prove(folder, source, config.model, dtype, run_dir)
    print_line(f"run={run} begins with {parameter_count(config.model):,} parameters from {folder}")
    for sentence in (*([UNTIED] if source.untied else []), *source.notices):
        print_line(sentence)
    print_line(proof)
    if isinstance(tokenizer, FileTokenizer):
        unlike = None if prove is False else unlike_theirs(tokenizer, run_dir / FOLDER)
        for sentence in (*tokenizer.doubts(), *([] if unlike is None else [unlike])):
            print_line(sentence)
    print_line(describe_tokenizer(tokenizer, folder))
    print_line("to train it further (choose data and optimizer; the run already has its model):")
    where = [] if runs_dir == Path(Config().runs_dir) else [spell("runs_dir", config.runs_dir)]
    print(" ".join(["parallel3d train", f"run={run}", *where]))
    return 0


def _prove(
    folder: Path, source: HFFolder, model: ModelConfig, dtype: torch.dtype, run_dir: Path
) -> str:
    if sentence := newer((TRANSFORMERS,)):
        print_line(sentence)
    # The model of transformers is freed before ours is made, so that only one is in memory.
    weights = None
    if source.quantization is not None:
        weights = dequantized_weights(folder, source.quantization)
    theirs = their_side(folder, model, wrapped=source.wrapped, alone=source.alone, weights=weights)
    del weights

    def fill(stage: Stage) -> None:
        read_state(run_dir / CHECKPOINTS / step_folder(0), state_of(stage))

    try:
        proof = verdict(folder, model, theirs, fill, dtype)
    except UserError as error:
        if not source.unread:
            raise
        raise UserError(
            f"{error}; the reason may be {listed(source.unread)} in config.json, which parallel3d "
            "does not read"
        ) from None
    if source.unread:
        proof += f"; {listed(source.unread)} in config.json, which parallel3d does not read, "
        proof += "changes none of them"
    return proof


def _configuration(
    folder: Path, run: str, runs_dir: Path, keys: dict[str, Any], overrides: list[str]
) -> Config:
    words = [*overrides, f"run={run}", f"runs_dir={runs_dir}"]
    config = composed(words)
    typed = [word.partition("=")[0].lstrip("+") for word in overrides]
    if "model" in typed:
        raise UserError(f"model=… must be left out, because {folder} determines the model")
    model = ModelConfig(**keys)
    model = model_from(model, config.model, typed.__contains__, str(folder), model.seq_length)
    config = keeping_biases(dataclasses.replace(config, model=model), typed.__contains__)
    return check_config(config, own_samples=True)
