"""Starts a new run from the weights of another run or of a Hugging Face folder (`init_from`).

The source determines the model and the tokenizer, so neither needs to be given. Nothing is
unpickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel3d.checkpoint.identity import MAY_DIFFER, ConfigChange, changes
from parallel3d.checkpoint.manifest import (
    PARAMETER,
    DamagedCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    list_checkpoints,
    read_manifest,
    read_together,
    step_of,
)
from parallel3d.checkpoint.runs import CONFIG_FILE, damage_refused, find_checkpoint, run_names
from parallel3d.config.fields import all_keys, check_fields, show, spell
from parallel3d.data.tokenizer import (
    BYTE,
    FOLDER,
    TOKENIZER,
    FileTokenizer,
    check_same_tokens,
    open_tokenizer,
)
from parallel3d.errors import UserError, nearest_hint
from parallel3d.files import plain
from parallel3d.models.declared import full_shapes_of
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import TARGET, OwnModelConfig, model_of_tree
from parallel3d.run_config import Config

if TYPE_CHECKING:
    from parallel3d.build import Trainer
    from parallel3d.checkpoint.hf.folder import HFFolder
    from parallel3d.checkpoint.storage import TensorChunks
    from parallel3d.comm.process_groups import ProcessGroups

RATE = "moe.bias_update_rate"


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of a run's initial weights.

    Attributes:
        name: the value of `init_from`, with the step if it is a run.
        folder: the checkpoint's folder, or the Hugging Face folder.
        model: the source's model.
        positions: the largest `seq_length` that the source allows, or None if any is allowed.
        tokenizer: name or path of the source's tokenizer. None means that the source's tokens are
            bytes if `has_bytes`, or else that its tokenizer is unknown.
        manifest: the checkpoint's manifest, or None for a Hugging Face folder.
        hf: the content of config.json in a Hugging Face folder, or None for a checkpoint.
        has_bytes: whether the source's tokens are bytes.
    """

    name: str
    folder: Path
    model: ModelConfig
    positions: int | None
    tokenizer: str | None
    manifest: Manifest | None = None
    hf: HFFolder | None = None
    has_bytes: bool = False

    @property
    def title(self) -> str:
        if self.manifest is None:
            return f"the Hugging Face folder {self.folder}"
        return f"step {self.manifest.step} of run {self.folder.absolute().parents[1].name}"


def find_source(init_from: str, runs_dir: Path) -> Source:
    """Returns the source that a value of `init_from` names.

    Torch is imported only for a Hugging Face folder. Raises UserError if the source is missing or
    damaged, or if this version of parallel3d does not know its model.
    """
    name, at, digits = init_from.rpartition("@")
    is_step = bool(at and name) and digits.isascii() and digits.isdigit() and len(digits) < 19
    name, step = (name, int(digits)) if is_step else (init_from, None)
    path = Path(name)
    if name in run_names(runs_dir):
        return _of_run(runs_dir / name, step, name)
    if (path / CONFIG_FILE).is_file():
        return _of_run(path, step, name)
    if step is None and any(path.glob("manifest-*.json")):
        return _of_checkpoint(path, init_from)
    if step is None and path.is_dir():
        return _of_hugging_face(path, init_from)
    raise UserError(
        f"init_from={init_from} must be a run in runs_dir={runs_dir}, run@step, or the folder of a "
        f"run, a checkpoint or a Hugging Face model{nearest_hint(name, run_names(runs_dir))}"
    )


def _of_run(run_dir: Path, step: int | None, name: str) -> Source:
    folders = list_checkpoints(run_dir)
    if step is not None or not folders:
        try:
            folder = find_checkpoint(run_dir.parent, run_dir.name, step)
        except UserError as error:
            if not folders:
                raise
            # A run that is still training may have removed this checkpoint after saving newer ones.
            raise UserError(
                f"init_from={name}@{step}: {error}; the run's checkpoint.keep may have removed it, "
                f"and init_from={name} takes the newest"
            ) from None
        return _of_checkpoint(folder, f"{name}@{step}")
    for folder in folders:
        try:
            read_manifest(folder)
        except (DamagedCheckpoint, UnreadableCheckpoint):
            continue
        return _of_checkpoint(folder, f"{name}@{step_of(folder)}")
    raise UserError(
        f"init_from={name} has no complete checkpoint ({len(folders)} tried); give another "
        "run, or wait until its folder can be read"
    )


def _of_checkpoint(folder: Path, name: str) -> Source:
    with damage_refused(f"init_from={name}", "; give another step, as in run@500"):
        manifest = read_manifest(folder)
    model = model_of(manifest, f"init_from={name}")
    learned = model.position_embedding == "learned"
    own, data = folder.absolute().parents[1] / FOLDER, manifest.config.get("data", {})
    tokenizer = str(own) if own.is_dir() else data.get("tokenizer")
    tokenizer = tokenizer if isinstance(tokenizer, str) else None
    longest = model.max_positions if learned else None
    text = tokenizer is None and data.get("name") in ("text", "stdlib") and manifest.step > 0
    of_bytes = tokenizer == BYTE or text
    return Source(name, folder, model, longest, tokenizer, manifest, has_bytes=of_bytes)


def _of_hugging_face(folder: Path, name: str) -> Source:
    import torch

    from parallel3d.checkpoint.hf.folder import read_hf_config
    from parallel3d.checkpoint.hf.their_code import check_unread

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process in which torch has started threads cannot fork ranks
    try:
        with _as_init_from():
            found = read_hf_config(folder)
            check_unread(
                f"from={folder}",
                found.kind,
                found.unread,
                "init_from compares no logits",
                f"import it, as in parallel3d checkpoint import from={folder} run=NAME, which "
                "compares them, and give init_from=NAME",
            )
            model = ModelConfig(**found.keys)
            path, tokenizer, of_bytes = folder / TOKENIZER, None, False
            if path.is_file():
                read = FileTokenizer.read(str(folder), path, "from")
                of_bytes = read.is_of_bytes()
                tokenizer = None if of_bytes else str(folder.absolute())
    finally:
        torch.set_num_threads(threads)
    longest = model.seq_length
    return Source(name, folder, model, longest, tokenizer, hf=found, has_bytes=of_bytes)


@contextmanager
def _as_init_from() -> Iterator[None]:
    """Replaces the key `from` with `init_from` in the error messages of an import."""
    try:
        yield
    except UserError as error:
        raise UserError(f"init_{error}" if str(error).startswith("from=") else str(error)) from None


def model_of(manifest: Manifest, where: str) -> ModelConfig:
    """Returns a checkpoint's model.

    Raises UserError, with a message that begins with `where`, if this version does not know the
    model.
    """
    try:
        if (own := model_of_tree(manifest.config["model"])) is not None:
            return own
        model = ModelConfig(**manifest.config["model"])
        check_fields(dataclasses.replace(Config(), model=model))
        return model
    except (KeyError, TypeError, UserError) as error:
        why = plain(str(error) if isinstance(error, UserError) else repr(error))
        raise UserError(
            f"{where} has no model that this version of parallel3d knows: {why}"
        ) from None


def model_from(
    source: ModelConfig,
    wanted: ModelConfig,
    is_given: Callable[[str], bool],
    where: str,
    positions: int | None,
) -> ModelConfig:
    """Returns the source's model with the values of `wanted` for given keys that may differ.

    Args:
        source: the source's model.
        wanted: the configured model.
        is_given: returns whether a key, such as model.seq_length, was given.
        where: the source's name, for errors.
        positions: the largest allowed seq_length, or None if any is allowed.

    Raises:
        UserError: if a given key contradicts the source, or if seq_length exceeds `positions`.
    """
    if isinstance(source, OwnModelConfig) or isinstance(wanted, OwnModelConfig):
        return _own_model_from(source, wanted, is_given, where)
    filled = dataclasses.asdict(source) | source.in_effect
    learned = source.position_embedding == "learned"
    if not learned:  # RoPE has no table of positions
        del filled["max_position_embeddings"]
    # A table of learned positions keeps all of its rows even if seq_length becomes smaller.
    model = dataclasses.replace(
        source, max_position_embeddings=source.max_positions if learned else None
    )
    for key, there in filled.items():
        here = getattr(wanted, key)
        if not is_given(f"model.{key}") or here is None:
            continue
        if key in MAY_DIFFER:
            model = dataclasses.replace(model, **{key: here})
        elif here != there:
            may = ", ".join(f"model.{key}" for key in MAY_DIFFER)
            raise UserError(
                f"model.{key}={show(here)}: {where} gives model.{key}={show(there)}; "
                f"keys that may differ are {may}"
            )
    if positions is not None and model.seq_length > positions:
        raise UserError(
            f"model.seq_length={model.seq_length} is more than the {positions} positions of "
            f"{where}; the nearest is model.seq_length={positions}"
        )
    return model


def _own_model_from(
    source: ModelConfig, wanted: ModelConfig, is_given: Callable[[str], bool], where: str
) -> ModelConfig:
    """Does the work of `model_from` where the source or this run has a user's own model.

    Given fields may differ, as `check_own_weights` compares the weights.
    """
    if isinstance(source, OwnModelConfig) and not isinstance(wanted, OwnModelConfig):
        raise UserError(
            f"{where} has a model of your own, whose code only runs where a start names it: give "
            f"{TARGET}={source._target_}"
        )
    there = f"{TARGET}={source._target_}" if source._target_ else "the transformer of parallel3d"
    if not isinstance(source, OwnModelConfig) or source._target_ != wanted._target_:
        raise UserError(
            f"{TARGET}={wanted._target_} is another model than that of {where}, which is {there}"
        )
    kept = {n: value for n, value in source.fields.items() if not is_given(f"model.{n}")}
    return dataclasses.replace(wanted, fields=(wanted.fields or {}) | kept)


def check_own_weights(config: Config) -> None:
    """Raises UserError unless `init_from` has the weights of this run's model of the user's own."""
    from parallel3d.checkpoint.storage import stored_shapes

    if config.init_from is None or not isinstance(config.model, OwnModelConfig):
        return
    source = find_source(config.init_from, Path(config.runs_dir))
    where = f"init_from={source.name}"
    with damage_refused(where):
        stored = stored_shapes(source.folder)
    for name, here in full_shapes_of(config.model).items():
        there = stored.get(f"{PARAMETER}/{name}")
        if there is None or tuple(there) != tuple(here):
            has = "no such parameter" if there is None else f"the shape {tuple(there)}"
            raise UserError(
                f"{where} has not the weights of {TARGET}={config.model._target_}: {name} has the "
                f"shape {tuple(here)} here, and {has} there"
            )


def keeping_biases(
    config: Config, is_given: Callable[[str], bool], there: Mapping[str, Any] | None = None
) -> Config:
    """Returns `config` with a rate of 0 for biases of finished routers, unless a rate is given.

    The default rate balances experts that are trained from the start; later it would change which
    experts a finished model uses, whatever the learning rate is. `there` is the configuration of a
    run whose training continues, which keeps its rate.
    """
    rate = config.moe.bias_update_rate
    if not config.model.router_bias or is_given(RATE) or rate != all_keys(Config)[RATE].default:
        return config
    rate = 0.0 if there is None else float(there.get("moe", {}).get("bias_update_rate", rate))
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, bias_update_rate=rate))


def begun_from(config: Config, is_given: Callable[[str], bool]) -> tuple[Config, str]:
    """Returns `config` with the model and the tokenizer of `init_from`, and a line to log.

    `is_given` returns whether a key was given. If `init_from` names a run without a step, the
    result names its newest step, so that all ranks load the same checkpoint. Raises UserError for a
    source that is missing or damaged, and for keys that contradict it.
    """
    assert config.init_from is not None
    source = find_source(config.init_from, Path(config.runs_dir))
    where = f"init_from={source.name}"
    model = model_from(source.model, config.model, is_given, where, source.positions)
    trained_with = _trained_with(source) if config.init_optimizer else None
    if trained_with is not None:
        _check_optimizer(source.title, changes(trained_with, config))
    data = config.data
    words = ""
    if data.tokenizer is None:  # the tokenizer comes from the source, even with data=chat
        data = dataclasses.replace(data, tokenizer=source.tokenizer)
        words = "" if data.tokenizer is None else f", tokenizer {data.tokenizer}"
    elif source.tokenizer is not None or source.has_bytes:
        there, here = open_tokenizer(source.tokenizer or BYTE), open_tokenizer(data.tokenizer)
        differs = check_same_tokens(there, here, where)
        words = "" if differs is None else f"; {differs}"
    config = dataclasses.replace(config, init_from=source.name, model=model, data=data)
    config = keeping_biases(config, is_given, trained_with)
    if source.hf is not None:
        words += "".join(f"; {sentence}" for sentence in source.hf.notices)
    return config, f"{where} gives model {model.name}, {model.num_layers} layers{words}"


def _trained_with(source: Source) -> Mapping[str, Any]:
    """Returns the configuration with which the source was trained.

    Raises UserError if the source has no optimizer state.
    """
    if source.manifest is None or source.manifest.has_weights_alone:
        raise UserError(
            f"init_optimizer=true: {source.title} has no optimizer state; the nearest is "
            "init_optimizer=false, or another init_from"
        )
    return source.manifest.config


def _check_optimizer(title: str, found: Sequence[ConfigChange]) -> None:
    """Raises UserError unless the source has the state of the configured optimizer.

    `title` names the source, and `found` lists the keys whose values differ from the source's.
    """
    for change in found:
        if change.key.startswith("optim.") and change.kind == "refused":
            there = spell(change.key, change.there)
            raise UserError(
                f"init_optimizer=true: {spell(change.key, change.here)}, but {title} has "
                f"the state of {there}; the nearest is {there}, or init_optimizer=false"
            )


def load_initial(trainer: Trainer, groups: ProcessGroups) -> Source:
    """Fills a trainer at step 0 with the weights of `init_from`, and returns their source.

    The call is collective. Each rank reads its own chunks of a checkpoint, or the rows that hold
    them from a Hugging Face folder. With `init_optimizer`, the state of the optimizer is read
    as well. Raises UserError on all ranks if the source is damaged or missing, and TrainingFailure
    if a rank cannot read it.
    """
    from parallel3d.checkpoint.checkpoints import without_frozen
    from parallel3d.checkpoint.storage import chunks_by_name, read_state
    from parallel3d.comm.exchange import all_gather_json
    from parallel3d.optim.optimizer import EMA
    from parallel3d.optim.thaws import thaws_of
    from parallel3d.parameters.slices import STATE

    config, slices = trainer.config, trainer.parameter_slices()
    kinds = {kind for s in slices for kind in s.values} - {EMA} if config.init_optimizer else set()
    for i, s in enumerate(slices):
        values = {k: v for k, v in s.values.items() if k in kinds or k in (PARAMETER, STATE)}
        slices[i] = dataclasses.replace(s, values=values)
    state = chunks_by_name(slices, shared=False)

    def read() -> Source:
        try:
            source = find_source(str(config.init_from), Path(config.runs_dir))
            if source.hf is not None:
                _read_hugging_face(source.folder, source.hf, config.model, state)
            else:
                assert source.manifest is not None  # a run's checkpoint has one
                read_state(source.folder, without_frozen(state, source.manifest))
            return source
        except UserError as error:
            raise DamagedCheckpoint(str(error)) from None
        except OSError as error:
            raise UnreadableCheckpoint(f"init_from={config.init_from}", error) from None

    def share(value: Any) -> list[Any]:
        return all_gather_json(value, groups.world.handle, trainer.device)

    source, problem = read_together(read, share)
    if source is None:
        start = "" if "init_from=" in str(problem) else f"init_from={config.init_from}: "
        remedy = "" if "takes the newest" in str(problem) else "; give another source"
        raise UserError(f"{start}{problem}{remedy}")
    if config.init_optimizer:
        assert source.manifest is not None  # `begun_from` has checked this
        progress = source.manifest.progress
        thaws = thaws_of(progress, source.manifest.config, config.optim)
        trainer.optimizer.restore(int(progress["updates"]), thaws, progress)
        trainer.loss_scale.restore(progress)
    trainer.optimizer.start_ema()
    trainer.data_parallel.all_gather_params()
    trainer.data_parallel.wait_for_all_gathers()
    return source


def _read_hugging_face(
    folder: Path, hf: HFFolder, model: ModelConfig, state: dict[str, TensorChunks]
) -> None:
    """Fills the chunks of `state` from a Hugging Face folder. Raises UserError if it is invalid."""
    from parallel3d.checkpoint.hf.folder import tensors_of

    chunks_of = {name.partition("/")[2]: tensor.chunks for name, tensor in state.items()}
    with _as_init_from():
        wanted = {
            name: (
                min(chunk.offsets[0] for chunk, _ in chunks),
                max(chunk.offsets[0] + chunk.sizes[0] for chunk, _ in chunks),
            )
            for name, chunks in chunks_of.items()
        }
        tensors = tensors_of(
            folder,
            model,
            hf.kind,
            wanted=wanted,
            mtp=hf.mtp,
            wrapped=hf.wrapped,
            quantization=hf.quantization,
        )
        for name, rows in tensors:
            start = (wanted[name][0], *[0] * (rows.dim() - 1))
            for chunk, values in chunks_of[name]:
                values.copy_(chunk.of(rows, start))
