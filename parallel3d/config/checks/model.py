"""Cross-checks of the model, and of its split over tp."""

from __future__ import annotations

import math
from collections.abc import Callable

from parallel3d.config.fields import show
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.config.values import CUDNN, HALF_PRECISION, NARROW, PACKAGES
from parallel3d.errors import UserError, closest


def check_chunks(config: Config) -> None:
    """Raises UserError for chunks without sequence parallelism, or of unequal length."""
    chunks, local = config.tensor_parallel.chunks, config.model.seq_length // config.tp
    if chunks > 1 and not config.sp:
        raise UserError(
            f"tensor_parallel.chunks={chunks} needs sp=true, as it cuts what sequence parallelism "
            "gathers and scatters; without sp the nearest is tensor_parallel.chunks=1."
        )
    if config.sp and config.cp == 1 and local % chunks:  # cp pads
        close = closest(chunks, lambda n: local % n == 0, local) or 1
        raise UserError(
            f"tensor_parallel.chunks={chunks} must divide model.seq_length / tp = {local}; the "
            f"nearest is tensor_parallel.chunks={close}."
        )


def check_attention(config: Config) -> None:
    """Raises UserError for a kernel that device, type or mask exclude; `models.attention_kernel`
    checks the device itself."""
    if config.tensor_parallel.attention == "gather_qk" and config.compile:
        raise UserError(
            "tensor_parallel.attention=gather_qk is for comparison and is not compiled; the "
            "nearest is tensor_parallel.attention=heads, or compile=false."
        )
    kernel, precision = config.attention_kernel, config.precision.name
    if config.device == "cpu" and kernel in (CUDNN, *PACKAGES):
        raise UserError(
            f"attention_kernel={kernel} is a kernel of GPUs, but device=cpu has flash and math; "
            "the nearest is attention_kernel=flash."
        )
    on_gpus = config.device not in ("auto", "cpu")
    if on_gpus and kernel in NARROW and precision not in HALF_PRECISION:
        raise UserError(
            f"attention_kernel={kernel} takes bf16 and fp16 alone on GPUs, but precision="
            f"{precision}; the nearest is attention_kernel=auto, or precision=bf16."
        )
    if kernel == CUDNN and config.data.document_mask:
        raise UserError(
            "attention_kernel=cudnn has no kernel for documents of any length, but "
            "data.document_mask=true; the nearest is attention_kernel=flash."
        )


def divides_all(dividends: dict[str, int]) -> Callable[[int], bool]:
    common = math.gcd(*dividends.values())
    return lambda divisor: common % divisor == 0


def check_model(model: ModelConfig) -> None:
    hidden, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.kv_heads
    if model.head_dim is None and hidden % heads:
        raise UserError(
            f"model.hidden_size={hidden} must be a multiple of model.num_attention_heads={heads}; "
            f"the nearest is model.hidden_size={nearest_multiple(hidden, heads)}."
        )
    if heads % kv_heads:
        close = closest(kv_heads, lambda n: heads % n == 0, heads) or 1
        raise UserError(
            f"model.num_query_groups={kv_heads} must divide model.num_attention_heads={heads}; "
            f"the nearest is model.num_query_groups={close}."
        )
    if model.position_embedding == "learned" and model.seq_length > model.max_positions:
        raise UserError(
            f"model.seq_length={model.seq_length} must be at most "
            f"model.max_position_embeddings={model.max_positions} with learned positions; the "
            f"nearest is model.seq_length={model.max_positions}."
        )
    if model.position_embedding == "rope" and int(model.head_size * model.rotary_percent) < 2:
        _refuse_rotary(model)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_scaling_factor > 1 and low >= high:
        raise UserError(
            f"model.rope_low_freq_factor={show(low)} must be below model.rope_high_freq_factor="
            f"{show(high)}; the nearest is model.rope_low_freq_factor={show(high / 4)}."
        )


def _refuse_rotary(model: ModelConfig) -> None:
    """Raises the UserError for fewer than two dimensions, since RoPE rotates pairs."""
    if model.head_dim == 1:
        raise UserError(
            "model.position_embedding=rope needs heads at least 2 wide, but model.head_dim=1; the "
            "nearest is model.head_dim=2."
        )
    if model.head_size < 2:
        raise UserError(
            f"model.position_embedding=rope needs heads at least 2 wide, but model.hidden_size="
            f"{model.hidden_size} over model.num_attention_heads={model.num_attention_heads} makes "
            f"them {model.head_size}; the nearest is model.hidden_size="
            f"{2 * model.num_attention_heads}."
        )
    # Rounded up, so that its product with head_dim is not just below 2.
    least = math.ceil(2 / model.head_size * 1e4) / 1e4
    raise UserError(
        f"model.rotary_percent={show(model.rotary_percent)} leaves RoPE fewer than 2 of the "
        f"{model.head_size} dimensions of a head; the nearest is model.rotary_percent={least:g}."
    )


def _tp_dividends(config: Config) -> dict[str, int]:
    """Returns the sizes that tp must divide; the padded vocabulary comes last."""
    model = config.model
    sizes = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_size,
        "the padded vocabulary": model.padded_vocab_size,
    }
    if config.sp and config.cp == 1:
        sizes["model.seq_length"] = model.seq_length
    return sizes


def tp_splits(config: Config) -> Callable[[int], bool]:
    """Returns the function that tells whether a tensor-parallel size splits this model."""
    divides = divides_all(_tp_dividends(config))
    return lambda tp: divides(tp) and _splits_key_value_heads(config.model, tp)


def _splits_key_value_heads(model: ModelConfig, tp: int) -> bool:
    """Returns whether each rank has whole key-value heads, or each head equally many ranks."""
    return model.kv_heads % tp == 0 or tp % model.kv_heads == 0


def _nearest_tp(config: Config) -> int:
    """Returns the closest tensor-parallel size that splits this model."""
    close = closest(config.tp, tp_splits(config), min(_tp_dividends(config).values()))
    return close or 1  # 1 splits everything


def check_tensor_parallel(config: Config) -> None:
    tp, model = config.tp, config.model
    sizes = _tp_dividends(config)
    vocabulary = sizes.pop("the padded vocabulary")
    sizes.pop("model.seq_length", None)  # `check_sequence` has its sentence, which names sp
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % tp]
    if not _splits_key_value_heads(model, tp):
        wrong.append(f"model.num_query_groups={model.kv_heads} (or be a multiple of it)")
    if wrong:
        raise UserError(
            f"tp={tp} must divide {' and '.join(wrong)}; the nearest that fits this model is "
            f"tp={_nearest_tp(config)}."
        )
    if vocabulary % tp:
        multiple = closest(
            model.vocab_multiple,
            lambda m: -(-model.vocab_size // m) * m % tp == 0,
            model.vocab_multiple + tp,
        )
        raise UserError(
            f"tp={tp} must divide the padded vocabulary, {vocabulary} rows by model.vocab_size="
            f"{model.vocab_size} and model.vocab_multiple={model.vocab_multiple}; the nearest is "
            f"model.vocab_multiple={multiple or tp} or tp={_nearest_tp(config)}."
        )


def check_sequence(config: Config) -> None:
    """Raises UserError if sp does not split the sequence evenly; with tp=1 sp splits nothing.

    Context parallelism pads the sequence (`Config.padded_seq_length`).
    """
    tp, length = config.tp, config.model.seq_length
    if config.sp and config.cp == 1 and length % tp:
        raise UserError(
            f"sp=true needs tp={tp} to divide model.seq_length={length}; the nearest is "
            f"model.seq_length={nearest_multiple(length, tp)} or tp={_nearest_tp(config)}."
        )


def check_context_parallel(config: Config) -> None:
    """Raises UserError for a style of context parallelism that does not fit the model."""
    cp, style, model = config.cp, config.context_parallel.style, config.model
    if cp == 1:
        return
    if config.tensor_parallel.attention == "gather_qk":
        raise UserError(
            f"tensor_parallel.attention=gather_qk reads whole sequences, and cp={cp} splits them; "
            "the nearest is tensor_parallel.attention=heads."
        )
    asked = f"context_parallel.style={style}"
    if style == "ring" and model.dropout:
        raise UserError(
            f"{asked} merges parts of the softmax, of which model.dropout={show(model.dropout)} "
            "would drop probabilities; the nearest is context_parallel.style=gather."
        )
    heads, kv_heads = model.num_attention_heads // config.tp, max(1, model.kv_heads // config.tp)
    if style == "heads" and (heads % cp or (kv_heads % cp and cp % kv_heads)):
        have = (
            f"{heads} query heads and {kv_heads} key-value heads"
            if kv_heads < heads
            else (f"{heads} heads")
        )
        raise UserError(
            f"{asked} needs cp={cp} to divide the {have} of a tensor-parallel rank; the nearest is "
            "context_parallel.style=gather, for any number of heads."
        )


def nearest_multiple(value: int, unit: int) -> int:
    """Returns the multiple of `unit`, at least one, closest to `value` (ties: the smaller)."""
    below = value // unit * unit
    return max(unit, below if value - below <= below + unit - value else below + unit)
