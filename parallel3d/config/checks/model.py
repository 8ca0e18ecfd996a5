"""Cross-checks of the model, of its split over tp and cp, and of data parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable

from parallel3d.config.fields import show, spell
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.config.values import CUDNN, HALF_PRECISION, NARROW, PACKAGES
from parallel3d.errors import UserError, closest

PADDED = "the rows of the padded vocabulary"
WITH_SP = "(as sp=true) model.seq_length"


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
        # Rounded up, so that its product with head_dim is not just below 2.
        least = f"model.rotary_percent={math.ceil(2 / model.head_size * 1e4) / 1e4:g}"
        raise UserError(
            f"model.rotary_percent={show(model.rotary_percent)} leaves RoPE, which rotates pairs, "
            f"fewer than 2 of the {model.head_size} dimensions of a head; the nearest is "
            f"{least if model.head_size > 1 else 'model.head_dim=2'}."
        )
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_scaling_factor > 1 and low >= high:
        raise UserError(
            f"model.rope_low_freq_factor={show(low)} must be below model.rope_high_freq_factor="
            f"{show(high)}; the nearest is model.rope_low_freq_factor={show(high / 4)}."
        )


def _tp_dividends(config: Config) -> dict[str, int]:
    """Returns the sizes that tp must divide, by what they are called in a sentence.

    Context parallelism pads the sequence (`Config.padded_seq_length`).
    """
    model = config.model
    sizes = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_size,
        PADDED: model.padded_vocab_size,
    }
    if config.sp and config.cp == 1:
        sizes[WITH_SP] = model.seq_length
    return sizes


def tp_splits(config: Config) -> Callable[[int], bool]:
    """Returns the function that tells whether a tensor-parallel size splits this model."""
    common = math.gcd(*_tp_dividends(config).values())
    return lambda tp: common % tp == 0 and _splits_key_value_heads(config.model, tp)


def _splits_key_value_heads(model: ModelConfig, tp: int) -> bool:
    """Returns whether each rank has whole key-value heads, or each head equally many ranks."""
    return model.kv_heads % tp == 0 or tp % model.kv_heads == 0


def check_tensor_parallel(config: Config) -> None:
    """Raises UserError unless tp, sp and the chunks of sp split the model evenly."""
    tp, model, chunks = config.tp, config.model, config.tensor_parallel.chunks
    sizes = _tp_dividends(config)
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % tp]
    if not _splits_key_value_heads(model, tp):
        wrong.append(f"model.num_query_groups={model.kv_heads} (or be a multiple of it)")
    if wrong:
        close = closest(tp, tp_splits(config), min(sizes.values())) or 1  # 1 splits everything
        other = {
            WITH_SP: f", or model.seq_length={nearest_multiple(model.seq_length, tp)}",
            PADDED: f", or model.vocab_multiple={math.lcm(model.vocab_multiple, tp)}",
        }
        near = other.get(wrong[0].rpartition("=")[0], "") if len(wrong) == 1 else ""
        raise UserError(
            f"tp={tp} must divide {' and '.join(wrong)}; the nearest that fits this model is "
            f"tp={close}{near}."
        )
    if chunks > 1 and not config.sp:
        raise UserError(
            f"tensor_parallel.chunks={chunks} needs sp=true, as it cuts what sequence parallelism "
            "gathers and scatters; without sp the nearest is tensor_parallel.chunks=1."
        )
    local = model.seq_length // tp
    if config.sp and config.cp == 1 and local % chunks:
        near = f"tensor_parallel.chunks={closest(chunks, lambda n: local % n == 0, local) or 1}"
        raise UserError(
            f"tensor_parallel.chunks={chunks} must divide model.seq_length / tp = {local}; the "
            f"nearest is {near}."
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
    near = "the nearest is context_parallel.style=gather"
    if style == "ring" and model.dropout:
        raise UserError(
            f"context_parallel.style=ring merges parts of the softmax, of which model.dropout="
            f"{show(model.dropout)} would drop probabilities; {near}."
        )
    heads, kv_heads = model.num_attention_heads // config.tp, max(1, model.kv_heads // config.tp)
    if style == "heads" and (heads % cp or (kv_heads % cp and cp % kv_heads)):
        raise UserError(
            f"context_parallel.style=heads needs cp={cp} to divide the {heads} query heads and "
            f"{kv_heads} key-value heads of a tensor-parallel rank; {near}, for any heads."
        )


def nearest_multiple(value: int, unit: int) -> int:
    """Returns the multiple of `unit`, at least one, closest to `value` (ties: the smaller)."""
    below = value // unit * unit
    return max(unit, below if value - below <= below + unit - value else below + unit)


# Data parallelism


def check_data_parallel(config: Config, dp: int) -> None:
    """Checks hooks, bucket order and shards against `zero`; raises UserError."""
    ddp, zero, ranks = config.ddp, config.zero, dp * config.cp
    size, hook = ddp.shard_size, f"ddp.comm_hook={ddp.comm_hook}"
    for key, off in (("hierarchical", False), ("comm_hook", "none")):
        if zero and (value := getattr(ddp, key)) != off:
            raise UserError(
                f"{spell(f'ddp.{key}', value)} changes how whole gradients are summed, and "
                f"zero={zero} scatters them; the nearest is zero=0, or {spell(f'ddp.{key}', off)}."
            )
    if ddp.hierarchical and ddp.comm_hook != "none":
        raise UserError(
            f"{hook} and ddp.hierarchical=true are two ways to sum a bucket; the nearest is "
            "ddp.hierarchical=false, or ddp.comm_hook=none."
        )
    if ddp.comm_hook == "powersgd" and config.precision.name == "fp16":
        raise UserError(
            f"{hook} carries gradients over from step to step, and precision=fp16 changes their "
            "scale in between; the nearest is precision=bf16, or ddp.comm_hook=bf16."
        )
    if zero > 1 and ddp.bucket_order == "measured":
        raise UserError(
            f"ddp.bucket_order=measured orders gradient buckets, and zero={zero} has none; the "
            "nearest is ddp.bucket_order=model."
        )
    for name in ("reduce_every_microbatch", "shard_size"):
        if zero < 2 and (value := getattr(ddp, name)):
            raise UserError(
                f"{spell(f'ddp.{name}', value)} is read by zero=2 and zero=3 alone, but "
                f"zero={zero}; the nearest is ddp.{name}=null."
            )
    if size is not None and ranks > 1 and (size < 2 or ranks % size):
        near = closest(size, lambda n: n > 1 and ranks % n == 0, ranks) or ranks
        of = f"dp={ranks}" if config.cp == 1 else f"dp · cp = {ranks}"
        raise UserError(
            f"ddp.shard_size={size} must divide {of} and be at least 2; the nearest is "
            f"ddp.shard_size={near}."
        )
    if config.train.noise_scale:
        _check_noise_scale(config, ranks)


def _check_noise_scale(config: Config, ranks: int) -> None:
    """Raises UserError unless gradients of a part of the batch and exact sums are available."""
    least = min(config.batch_sizes.sizes)
    if config.zero > 1 and ranks > 1:
        why = f"the gradients of one replica before they are summed, which zero={config.zero} hides"
        near = "zero=1"
    elif config.optim.freeze:
        why = (
            f"no gradients of optim.freeze={show(config.optim.freeze)}, which the buckets hold too"
        )
        near = "train.noise_scale=false"
    elif config.ddp.comm_hook == "powersgd":
        why, near = "exact sums, not those of ddp.comm_hook=powersgd", "ddp.comm_hook=bf16"
    elif least == config.micro_batch_size:
        batch, near = f"global_batch_size={least}", f"global_batch_size={2 * least}"
        if config.train.batch_schedule is not None:
            batch, near = f"a batch of {least} in train.batch_schedule", f"one of {2 * least} there"
        why = f"two parts of a batch, and with dp=1 {batch} is one micro-batch"
    else:
        return
    raise UserError(f"train.noise_scale=true compares {why}; the nearest is {near}.")
