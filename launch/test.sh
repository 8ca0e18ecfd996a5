#!/usr/bin/env bash
# Runs the tests: ./launch/test.sh, or with pytest's arguments: ./launch/test.sh tests/unit -k layout
# The first start makes .venv beside this folder. Works from any directory.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."
exec "$VENV/bin/python" -m pytest -q "$@"
