#!/usr/bin/env bash
# Trains on this machine: ./launch/local.sh tp=2 pp=2 (every key of parallel3d train works).
# The first start makes .venv next to this folder, with the packages for training. It works from any directory; runs/ is made there.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh" train
exec "$VENV/bin/parallel3d" train "$@"
