#!/usr/bin/env bash
# Every check of this repository: style, types, import rules, tests. Arguments go to pytest.
#
#   scripts/test.sh                          all
#   scripts/test.sh parity_tests/core -x     the checks, and these tests
#
# Ends 0 only if all are clean; everything is run even if something fails.
set -uo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$repo/scripts/setup/setup_env.sh" || exit $?
cd "$repo" || exit 2
. scripts/setup/environment.sh
bin=.venv/bin
unclean=()

check() { # name, command…
    local name=$1
    shift
    printf '── %s\n' "$name"
    "$@" || unclean+=("$name")
}

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
check "lint-imports" "$bin/lint-imports" --cache-dir .cache/import_linter

# Two workers share the cores; more threads than that wait for each other.
workers=2
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
threads=$((cores / workers))
[ "$threads" -ge 1 ] || threads=1
[ "$threads" -le 2 ] || threads=2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
export MKL_NUM_THREADS=${MKL_NUM_THREADS:-$OMP_NUM_THREADS}
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$OMP_NUM_THREADS}

# pytest comes last and has the last word but one; that it collected nothing (exit code 5) is a failure like any other.
printf '── pytest\n'
[ ${#unclean[@]} -eq 0 ] || printf 'not clean so far: %s\n' "$(IFS=,; echo "${unclean[*]}")"
"$bin/python" -m pytest -n "$workers" "$@" || unclean+=("pytest (exit code $?)")

if [ ${#unclean[@]} -gt 0 ]; then
    printf 'scripts/test.sh: not clean: %s\n' "$(IFS=,; echo "${unclean[*]}")" >&2
    exit 1
fi
