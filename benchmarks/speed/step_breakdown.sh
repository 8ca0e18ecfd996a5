#!/bin/sh
# Where the time of a step goes: the peers' model on four ranks, a table in the closing panel.
set -eu
cd "$(dirname "$0")/../.."
runs=$(mktemp -d)
OMP_NUM_THREADS=1 "${PYTHON:-python}" -m parallel3d train tp=2 pp=2 device=cpu run=tp2-pp2 runs_dir="$runs" \
    model=llama_tiny model.num_layers=8 model.hidden_size=256 model.num_attention_heads=8 \
    model.num_query_groups=8 model.ffn_hidden_size=688 model.seq_length=256 \
    micro_batch_size=2 global_batch_size=16 checkpoint.every=0 train.steps=11 train.eval_batches=0
