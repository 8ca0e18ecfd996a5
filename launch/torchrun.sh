#!/usr/bin/env bash
# Trains on several hosts under torchrun. On every host, with the same MASTER:
#
#   MASTER=host0:29500 NODES=2 RANKS=8 ./launch/torchrun.sh tp=8 pp=2
#
# NODES: hosts (default 1); RANKS: ranks on each host (default: its GPUs, or its cores without);
# MASTER: host and port of one of them (default: this host and a free port, for NODES=1).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
nodes=${NODES:-1}
if [[ -n ${MASTER:-} ]]; then
  rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="$MASTER" --rdzv-id="${RUN_ID:-parallel3d}")
elif [[ $nodes == 1 ]]; then
  rendezvous=(--standalone)
else
  echo "torchrun.sh: NODES=$nodes needs MASTER=host:port, the same on every host" >&2
  exit 2
fi
exec "$VENV/bin/torchrun" --nnodes="$nodes" --nproc-per-node="${RANKS:-auto}" \
  "${rendezvous[@]}" -m parallel3d train "$@"
