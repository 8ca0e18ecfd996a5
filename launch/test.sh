#!/usr/bin/env bash
# Runs the tests: ./launch/test.sh, or with pytest's arguments: ./launch/test.sh tests/unit -k layout
# ./launch/test.sh fast: the unit tests that are not marked slow, under two minutes on two cores.
# All of them are shared by three processes (tests/conftest.py says how), a choice runs in one.
# The first start makes .venv beside this folder. Works from any directory.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."
# Some images set it: each of the hundreds of processes would compile the package for itself.
unset PYTHONDONTWRITEBYTECODE
if [[ ${1:-} == fast ]]; then
    set -- -n 2 -m "not slow" tests/unit "${@:2}"
fi
case " $*" in
*" tests"* | *" -k"* | *" -n"*) ;;
*) set -- -n 3 "$@" ;;
esac
exec "$VENV/bin/python" -m pytest -q "$@"
