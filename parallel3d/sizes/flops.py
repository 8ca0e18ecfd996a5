"""What one training token costs, and how many parameters there are, from the model's shape alone.

Conventions (each changes the MFU that is printed, so they are written down):

* Only matrix products count: 2 FLOPs per multiply-add, once forward and twice backward, i.e.
  6 per weight and token. Norms, softmax, activations and the optimizer are not model FLOPs.
* Attention scores and their product with the values count over the full s × s square, not the
  causal half, as in PaLM (Chowdhery et al. 2022, appendix B), Narayanan et al. 2021 (equation 3)
  and torchtitan, so that figures can be compared. Causal kernels skip up to half of it, and with
  document masks whatever lies between documents. It counts all the same: an MFU with masks can
  be compared between layouts on the same data, not with one without masks.
* Recomputed activations never count: this is model (MFU), not hardware (HFU) utilisation.
* The output head counts the tokens that exist (`vocab_size`): padded logits are not useful work.
* Looking up embeddings is no matrix product and counts nothing.
"""

from __future__ import annotations

from parallel3d.config.schema import ModelConfig

MFU_FORMULA = "tokens_per_s × flops_per_token / (world_size × peak_flops_per_device)"
FLOPS_FORMULA = "6 × matmul weights + 12 × layers × heads × head_dim × seq_length (full attention)"


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that a token is multiplied with: the layers' matrices and the head, tied or not."""
    hidden, ffn = model.hidden_size, model.ffn_size
    queries = model.num_attention_heads * model.head_size
    keys = model.kv_heads * model.head_size
    attention = hidden * (queries + 2 * keys) + queries * hidden
    mlp = _mlp_matrices(model) * hidden * ffn
    return model.num_layers * (attention + mlp) + hidden * model.vocab_size


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of training, forward and backward, on one token of a `seq_length` tokens' sample.

    6 × matmul weights + 12 × layers × heads × head_dim × seq_length; see the conventions above.
    """
    queries = model.num_attention_heads * model.head_size
    attention = 12 * model.num_layers * queries * seq_length
    return float(6 * matmul_parameters(model) + attention)


def parameter_count(model: ModelConfig) -> int:
    """Distinct trainable parameters of the unpadded model; a tied table counts once."""
    hidden, ffn = model.hidden_size, model.ffn_size
    norm = 2 * hidden if model.norm == "layernorm" else hidden
    layers = matmul_parameters(model) - hidden * model.vocab_size + model.num_layers * 2 * norm
    layers += model.num_layers * _attention_vectors(model)
    if model.bias:
        layers += model.num_layers * ((_mlp_matrices(model) - 1) * ffn + hidden)
    tables = 1 if model.tie_embeddings else 2
    positions = model.max_positions * hidden if model.position_embedding == "learned" else 0
    return layers + tables * hidden * model.vocab_size + positions + norm


def _attention_vectors(model: ModelConfig) -> int:
    """Elements of a layer's biases and head norms in attention."""
    rows = (model.num_attention_heads + 2 * model.kv_heads) * model.head_size
    found = rows if model.qkv_bias else 0
    found += model.hidden_size if model.out_bias else 0
    return found + (2 * model.head_size if model.qk_norm else 0)


def _mlp_matrices(model: ModelConfig) -> int:
    """up and down, and with swiglu the gate."""
    return 3 if model.activation == "swiglu" else 2
