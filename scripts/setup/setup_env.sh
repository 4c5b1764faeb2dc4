#!/usr/bin/env bash
# Makes .venv with everything that Lockstep needs, or brings it up to date. Safe to run twice, at once, and after an interruption.
#
#   scripts/setup/setup_env.sh           checks the machine, then makes or updates .venv
#   scripts/setup/setup_env.sh --check   checks the machine only
#
# PYTHON=/path/to/python chooses the Python. Ends 0, or 2 with what is missing in plain words.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$repo/.venv
stamp=$venv/lockstep.stamp
log=$repo/.cache/setup_env.log
needed_gb=${LOCKSTEP_DISK_GB:-} # else chosen by platform below

. "$repo/scripts/setup/say.sh"
problems=()
problem() { problems+=("$*"); }
stop_if_problems() {
    [ ${#problems[@]} -eq 0 ] && return
    for line in "${problems[@]}"; do say "$line" >&2; done
    exit 2
}

# --- Python ---------------------------------------------------------------------------------------------------------

python_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() { # sets $python, or reports a problem
    python=
    local name version seen=
    if [ -n "${PYTHON:-}" ]; then
        if ! version=$("$PYTHON" -c 'import platform; print(platform.python_version())' 2>/dev/null); then
            problem "PYTHON=$PYTHON does not run. Set PYTHON to a Python 3.11 or newer, or unset it."
        elif python_is_new_enough "$PYTHON"; then
            python=$PYTHON
        else
            problem "PYTHON=$PYTHON is Python $version; Lockstep needs Python 3.11 or newer."
        fi
        return
    fi
    for name in python3.13 python3.12 python3.11 python3 python; do
        if python_is_new_enough "$name"; then
            python=$name
            return
        fi
        version=$("$name" -c 'import platform; print(platform.python_version())' 2>/dev/null) && seen="$seen $name=$version"
    done
    problem "Lockstep needs Python 3.11 or newer; found:${seen:- none}. Install one, or set PYTHON=/path/to/python."
}

check_python() {
    if [ -x "$venv/bin/python" ] && python_is_new_enough "$venv/bin/python"; then
        python=$venv/bin/python
    else
        find_python
        [ -n "$python" ] || return 0
        "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
            problem "$python cannot make virtual environments: its venv module is missing (Debian and Ubuntu: apt install python3-venv)."
    fi
    # torch.compile's CPU code includes Python.h: without it the first compiled step ends in a compiler error.
    "$python" -c '
import os, sys, sysconfig
include = sysconfig.get_path("include")
found = os.path.exists(os.path.join(include, "Python.h"))
sys.exit(not (found or sys.platform == "darwin"))' ||
        problem "Python's header files (Python.h) are missing for $python: torch.compile needs them (Debian and Ubuntu: apt install python3-dev)."
}

# --- the rest of the machine ----------------------------------------------------------------------------------------

check_compiler() {
    local name
    if [ -n "${CXX:-}" ]; then # a command, perhaps with arguments
        command -v "${CXX%% *}" >/dev/null 2>&1 || problem "CXX=$CXX is not there; torch.compile needs a C++ compiler."
        return
    fi
    for name in g++ c++ clang++; do
        command -v "$name" >/dev/null 2>&1 && return
    done
    problem "no C++ compiler (looked for g++, c++, clang++): torch.compile needs one (Debian and Ubuntu: apt install g++; macOS: xcode-select --install)."
}

check_disk() {
    [ -f "$stamp" ] && return
    local free_gb
    if [ -z "$needed_gb" ]; then
        # Measured on Linux: 2 GB with a torch for CPUs. The default torch for Linux brings CUDA's libraries along.
        needed_gb=4
        [ "$(uname -s)" = Linux ] && needed_gb=10
        [ -x "$venv/bin/python" ] && needed_gb=1
    fi
    free_gb=$(df -Pk "$repo" | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free_gb" -ge "$needed_gb" ] ||
        problem "$free_gb GB are free in $repo, about $needed_gb GB are needed for .venv, most of it for torch with CUDA (LOCKSTEP_DISK_GB=0 skips this check)."
}

check_machine() {
    check_python
    check_compiler
    check_disk
    stop_if_problems
    command -v git >/dev/null 2>&1 || say "git was not found: run.json will not name the commit."
}

# --- the environment ------------------------------------------------------------------------------------------------

fingerprint() { # of what decides the contents of .venv, its place included: scripts in it name their interpreter
    cat "$repo/pyproject.toml" "$repo/constraints.txt" <(echo "$venv") |
        "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

up_to_date() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; }

take_lock() { # so that two of us do not install at once; released when this process ends
    command -v flock >/dev/null 2>&1 || return 0
    exec 9>"$repo/.cache/setup_env.lock"
    flock -n 9 && return
    say "another setup of this environment is running; waiting for it"
    flock 9
}

make_venv() {
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making .venv with Python $("$python" -c 'import platform; print(platform.python_version())')"
        "$python" -m venv --clear "$venv" 2>&1 | tee "$log" || return 1
    fi
}

install() {
    say "installing packages into .venv (some minutes the first time; the whole story is in .cache/setup_env.log)"
    cd "$repo"
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e ".[test]" 2>&1 |
        tee "$log" |
        { grep --line-buffered -E '^(  )?Downloading .*\([0-9.]+ [MG]B\)|^Installing collected' || true; } |
        sed -u -E 's/^ *Downloading ([^ ]+\/)?([^ -]+-[^ -]+)[^ ]* (\(.*\)).*/lockstep:   \2 \3/; s/^Installing collected.*/lockstep:   unpacking/'
}

main() {
    check_machine
    [ "${1:-}" = --check ] && { say "this machine has what Lockstep needs"; return; }
    up_to_date && return
    mkdir -p "$repo/.cache" 2>/dev/null || { problem "cannot write to $repo"; stop_if_problems; }
    take_lock
    up_to_date && return
    rm -f "$stamp"
    if ! make_venv || ! install; then
        tail -n 15 "$log" >&2
        problem "the packages could not be installed; the lines above are pip's last, $log has all. Run this again to go on."
        stop_if_problems
    fi
    fingerprint >"$stamp.new"
    mv "$stamp.new" "$stamp" # last: an interrupted installation has no stamp and is done again
    say "environment ready: $venv"
}

main "$@"
