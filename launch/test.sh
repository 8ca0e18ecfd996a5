#!/usr/bin/env bash
# Runs the tests, in sets (CONTRIBUTING.md says when to run which):
#   ./launch/test.sh fast     unit tests of less than a fifth of a second each: a minute on two cores
#   ./launch/test.sh          these, and what a change of the package most likely breaks: six minutes
#   ./launch/test.sh nightly  all else that a change of the package can break
#   ./launch/test.sh more     planted bugs, tests of benchmarks, pages, Slurm, rails, browser, types
#   ./launch/test.sh all      all of them; with --write-times it measures them for tests/times.json
# Or tests that pytest's arguments select, from any set: ./launch/test.sh tests/unit -k layout
# A set is shared by two or three processes, file by file; a choice runs in one.
# The first start makes .venv next to this folder. It works from any directory.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh" test
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."
# Some images set it, and then each of the hundreds of processes would compile the package itself.
unset PYTHONDONTWRITEBYTECODE
case "${1:-} $*" in
"fast "*) set -- -n 2 -m "not slow and not nightly and not more" tests/unit "${@:2}" ;;
"nightly "*) set -- -n 3 -m "nightly and not more" "${@:2}" ;;
"more "*) set -- -n 3 -m more "${@:2}" ;;
"all "*) set -- -n 3 "${@:2}" ;;
*" tests"* | *"/tests"* | *" -k"* | *" -m"* | *" --lf"* | *" --last-failed"*) ;;
*) set -- -n 3 -m "not nightly and not more" "$@" ;;
esac
exec "$VENV/bin/python" -m pytest -q "$@"
