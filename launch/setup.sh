#!/usr/bin/env bash
# Makes .venv next to this folder and installs parallel3d into it; quick if that is done already.
#
#   ./launch/setup.sh             packages for training
#   ./launch/setup.sh test        also packages for tests and docs (the extra `test` of pyproject.toml)
#   source launch/setup.sh SET    one of the two, train or test; $VENV names the environment afterwards
#
# Needs bash and Python >= 3.11 with venv, nothing else. PYTHON picks another interpreter.
# On a machine without a GPU pip may fetch torch's CUDA build, which is several times larger: set
# PIP_EXTRA_INDEX_URL (or PIP_INDEX_URL) to PyTorch's index of CPU wheels before the first start.

_p3d_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$_p3d_root/.venv"

_p3d_say() { printf 'setup: %s\n' "$*" >&2; }

# Finds the first Python that is new enough, or ends with a sentence.
_p3d_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
    [[ -n $candidate ]] && command -v "$candidate" >/dev/null || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  _p3d_say "parallel3d needs Python 3.11 or newer; found: $(python3 --version 2>&1 || true)." \
    "Install one, or name it: PYTHON=/path/to/python3 $0"
  return 1
}

# Describes what the environment was made from. The stamp of a finished set-up has the same line
# after the name of its set.
_p3d_fingerprint() {
  local python=$1
  {
    "$python" -c 'import platform; print(platform.python_version(), platform.machine())'
    cat "$_p3d_root/pyproject.toml" "$_p3d_root/constraints.txt"
    printf '%s\n' "$_p3d_root"
  } | cksum
}

# Runs pip quietly: it only shows pip's own errors, and on failure all of pip's output.
_p3d_pip() {
  local log status=0
  log=$(mktemp)
  "$VENV/bin/python" -m pip "$@" --disable-pip-version-check --quiet >"$log" 2>&1 || status=$?
  grep -v -E '^WARNING: (Location|The directory)|^$' "$log" >&2 || true
  rm -f "$log"
  return "$status"
}

# Tests whether this Python has made an environment in this very place.
_p3d_usable() {
  local version='import sys; print(sys.version)'
  grep -q -F -- "$VENV" "$VENV/bin/activate" 2>/dev/null &&
    [[ "$("$VENV/bin/python" -c "$version" 2>/dev/null)" == "$("$1" -c "$version")" ]]
}

# Says that there is a CPU build if pip is about to fetch torch with CUDA's libraries: on Linux,
# unless the build that pip takes, the newest of the pinned version, is one for the CPU.
_p3d_warn_of_cuda() {
  local pinned builds
  [[ $(uname -s) == Linux ]] || return 0
  "$VENV/bin/python" -m pip show torch >/dev/null 2>&1 && return
  pinned=$(sed -n 's/^torch==//p' "$_p3d_root/constraints.txt")
  builds=$("$VENV/bin/python" -m pip index versions torch 2>/dev/null | sed -n 's/^Available.*: //p')
  [[ ", $builds" =~ ", $pinned"("+"[a-z0-9.]+)?(,|$) && ${BASH_REMATCH[1]} == +cpu ]] && return
  _p3d_say "torch $pinned comes with CUDA's libraries, a download of over 2 GB. A machine without" \
    "a GPU needs its CPU build alone, 200 MB: stop here (Ctrl-C) and start again with" \
    "PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU wheels>, which pytorch.org/get-started names."
}

_p3d_install() {
  local python=$1 set=$2 fingerprint=$3 extra="" start=$SECONDS
  [[ $set == train ]] || extra="[$set]"
  if _p3d_usable "$python"; then
    _p3d_say "bringing $VENV up to date"
  elif _p3d_say "making $VENV with $("$python" --version)" &&
    ! "$python" -m venv --clear "$VENV" >&2; then
    _p3d_say "$python cannot make environments: install its venv module" \
      "(on Debian and Ubuntu the package python3-venv)."
    return 1
  fi
  _p3d_warn_of_cuda
  _p3d_say "$((SECONDS - start)) s; installing what $set needs, once (a minute or a few)"
  if ! _p3d_pip install -c "$_p3d_root/constraints.txt" -e "$_p3d_root$extra"; then
    _p3d_say "the installation failed after $((SECONDS - start)) s; pip's words are above."
    return 1
  fi
  printf '%s %s\n' "$set" "$fingerprint" >"$VENV/.parallel3d-stamp"
  _p3d_say "$((SECONDS - start)) s; done"
}

_p3d_setup() {
  local set=${1:-train} python fingerprint
  if [[ $set != train && $set != test ]]; then
    _p3d_say "$set is no set of packages: train or test"
    return 2
  fi
  python=$(_p3d_python) || return
  fingerprint=$(_p3d_fingerprint "$python")
  # An environment for tests also has everything for training.
  _p3d_done() {
    case $(cat "$VENV/.parallel3d-stamp" 2>/dev/null) in
    "$set $fingerprint" | "test $fingerprint") ;;
    *) return 1 ;;
    esac
  }
  _p3d_done && return
  # If two scripts run at once, one installs, the other waits and finds it done.
  (
    if command -v flock >/dev/null; then
      flock -n 9 || { _p3d_say "another set-up is at work; waiting for it" && flock 9; }
    fi
    _p3d_done || _p3d_install "$python" "$set" "$fingerprint"
  ) 9>"$_p3d_root/.venv.lock"
}

_p3d_setup "$@"
