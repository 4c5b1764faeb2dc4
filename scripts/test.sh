#!/usr/bin/env bash
# Every check of this repository: style, types, import rules, tests. Arguments go to pytest.
#
#   scripts/test.sh                          lint, types, import contracts, and the tests of the default run
#   scripts/test.sh --all                    the same with every test, the slow ones of parity_tests/slow_tests.toml too
#   scripts/test.sh parity_tests/core -x     the checks, and these tests
#
# Ends 0 only if all are clean; everything is run even if something fails. The last lines are the parts, with the
# seconds that each took. mypy and lint-imports run beside the tests: one core would idle meanwhile.
set -uo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$repo/scripts/setup/setup_env.sh" || exit $?
cd "$repo" || exit 2
. scripts/setup/environment.sh
# Without bytecode, each of the many processes that tests start would compile Lockstep's sources anew, for a second.
unset PYTHONDONTWRITEBYTECODE
bin=.venv/bin
unclean=()
parts=()
SECONDS=0

check() { # name, command…
    local name=$1 began=$SECONDS code=0
    shift
    printf '── %s\n' "$name"
    "$@" || code=$?
    ended "$name" $((SECONDS - began)) "$code"
}

ended() { # name, seconds, exit code
    [ "$3" -eq 0 ] || unclean+=("$1 (exit code $3)")
    parts+=("$(printf '%-14s %4d s   %s' "$1" "$2" "$([ "$3" -eq 0 ] && echo clean || echo "exit code $3")")")
}

# The output of a part in the background is printed in one piece when the part has ended.
aside=$(mktemp -d) || exit 2
background=()
beside() { # name, command…
    local name=$1
    shift
    (
        # Without the trap, the command would outlive a Ctrl-C.
        trap 'kill "$command" 2>/dev/null; exit 143' TERM
        began=$SECONDS
        "$@" >"$aside/$name.txt" 2>&1 &
        command=$!
        wait "$command"
        code=$?
        printf '%s %s\n' $((SECONDS - began)) "$code" >"$aside/$name.ended"
        printf '\n── %s\n%s\n' "$name" "$(cat "$aside/$name.txt")"
    ) &
    background+=("$name $!")
}

stop() {
    local part
    for part in ${background[@]+"${background[@]}"}; do kill "${part##* }" 2>/dev/null; done
    rm -rf "$aside"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
beside "mypy" "$bin/mypy"
beside "lint-imports" "$bin/lint-imports" --cache-dir .cache/import_linter

# Two workers share the cores; more threads than that wait for each other.
workers=2
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
threads=$((cores / workers))
[ "$threads" -ge 1 ] || threads=1
[ "$threads" -le 2 ] || threads=2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
export MKL_NUM_THREADS=${MKL_NUM_THREADS:-$OMP_NUM_THREADS}
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$OMP_NUM_THREADS}

# Each worker takes half of the tests in order, and from the other's rest when it is done: what a module or folder
# shares is made once, and the last minutes are even. That pytest collected nothing (exit code 5) is a failure.
check "pytest" "$bin/python" -m pytest -n "$workers" --dist worksteal "$@"

for part in ${background[@]+"${background[@]}"}; do
    name=${part% *}
    wait "${part##* }"
    seconds=0 code=1
    [ ! -f "$aside/$name.ended" ] || read -r seconds code <"$aside/$name.ended"
    ended "$name" "$seconds" "$code"
done
background=()

printf '── parts\n'
printf '%s\n' "${parts[@]}"
printf '%-14s %4d s\n' all "$SECONDS"

if [ ${#unclean[@]} -gt 0 ]; then
    printf 'scripts/test.sh: not clean: %s\n' "$(printf '%s; ' "${unclean[@]}" | sed 's/; $//')" >&2
    exit 1
fi
