#!/usr/bin/env bash
# Runs the tests: ./launch/test.sh, or with pytest's arguments: ./launch/test.sh tests/unit -k layout
# All of them are shared by three processes (tests/conftest.py says how), a choice runs in one.
# The first start makes .venv beside this folder. Works from any directory.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."
# Some images set it: each of the hundreds of processes would compile the package for itself.
unset PYTHONDONTWRITEBYTECODE
case " $*" in
*" tests"* | *" -k"* | *" -n"*) ;;
*) set -- -n 3 "$@" ;;
esac
exec "$VENV/bin/python" -m pytest -q "$@"
