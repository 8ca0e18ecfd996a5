#!/usr/bin/env bash
# Trains on several hosts under torchrun. On every host, with the same MASTER:
#
#   MASTER=host0:29500 NODES=2 RANKS=8 NODE_RANK=0 ./launch/torchrun.sh tp=8 pp=2
#
# NODES: hosts (default 1); RANKS: ranks on each host (default: its GPUs, or its cores without);
# MASTER: host 0 and a port of it (default: this host and a free port, for NODES=1);
# NODE_RANK: 0 on that host, 1, 2, … on the others. Without it torchrun numbers the hosts by a
# rendezvous that unpickles whatever reaches its port: use that in trusted networks only.
# PARALLEL3D_SECRET: the same long random word on every host (default: a new one, for NODES=1).
# In a checkout it makes .venv first. A copy that `parallel3d init slurm` wrote uses the Python on
# the PATH, or PYTHON, in which parallel3d is installed.
set -euo pipefail
setup="$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
if [[ -f $setup ]]; then
  source "$setup"
  python="$VENV/bin/python"
else
  python=${PYTHON:-python}
fi
nodes=${NODES:-1}
if [[ -n ${MASTER:-} && -n ${NODE_RANK:-} ]]; then
  rendezvous=(--master-addr="${MASTER%:*}" --master-port="${MASTER##*:}" --node-rank="$NODE_RANK")
elif [[ -n ${MASTER:-} ]]; then
  rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="$MASTER" --rdzv-id="${RUN_ID:-parallel3d}")
elif [[ $nodes == 1 ]]; then
  port=$("$python" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
  rendezvous=(--master-addr=127.0.0.1 --master-port="$port" --node-rank=0)
  export PARALLEL3D_SECRET="${PARALLEL3D_SECRET:-$("$python" -c 'import secrets; print(secrets.token_hex())')}"
else
  echo "torchrun.sh: NODES=$nodes needs MASTER=host:port, the same on every host" >&2
  exit 2
fi
exec "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="${RANKS:-auto}" \
  "${rendezvous[@]}" -m parallel3d train "$@"
