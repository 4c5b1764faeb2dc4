#!/usr/bin/env bash
# Everything that needs a GPU, in one command: its tests, parity checks of every policy, eager and compiled, against JAX,
# and the bench of whole steps.
#
#   scripts/gpu_check.sh [--minutes N] [--only PART] [--from BENCH.json] [--tiny] [OUT] [-- BENCH ARGUMENTS]
#
#   --minutes N   for all of it (default 10); what the bench does not get done is left for the next call
#   --only PART   tests, parity, sums or bench, which all run without it; or one that needs a call of its own:
#                 large (checks of two layers of the 1.24B model at its own sizes, the reference on the GPU too),
#                 watch (other people's loops under lockstep.watch, single operations, torch's kernels, all families:
#                 docs/results/*_cuda.jsonl and honest_kernels.jsonl; what is there is not run again),
#                 best_bf16, best_fp8 (the best configuration of [64, 2048]), curves (256 real steps of both, three
#                 seeds of the first; what is in OUT/curves.json is not trained again, so call it until it says)
#   --from FILE   a bench_step.json of an earlier call: its rows are not measured again
#   --tiny        on the CPU, at the size of configs/bench-tiny.toml, to see that the command itself works
#   OUT           where everything is written (default: $OUT, else gpu_check)
#
# PYTHON=… chooses the Python (default: .venv/bin/python if it is there, else python3). What it lacks for the parts asked
# for (scripts/shared/needs.py) is said in one line before anything else. Ends 0 only if all is good, 2 if it could not begin.
set -uo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
minutes=10 only= from= tiny= out=${OUT:-gpu_check}
usage() {
    sed -n '2,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit "$1"
}
value() { [ $# -ge 2 ] || { printf 'gpu_check: %s needs a value\n' "$1" >&2; exit 2; }; }
while [ $# -gt 0 ]; do
    case "$1" in
        --minutes) value "$@"; minutes=$2; shift 2 ;;
        --only) value "$@"; only=$2; shift 2 ;;
        --from) value "$@"; from=$2; shift 2 ;;
        --tiny) tiny=yes; shift ;;
        --help | -h) usage 0 ;;
        --) shift; break ;;
        -*) usage 2 >&2 ;;
        *) out=$1; shift ;;
    esac
done
case "$only" in "" | tests | parity | sums | bench | large | watch | best_bf16 | best_fp8 | curves) ;; *) usage 2 >&2 ;; esac
if [ "$only" = watch ] && [ -n "$tiny" ]; then printf 'gpu_check: --only watch has no --tiny: its rows are of a GPU\n' >&2; exit 2; fi
case "$minutes" in '' | *[!0-9]* | 0) printf 'gpu_check: --minutes %s: a whole number of minutes\n' "$minutes" >&2; exit 2 ;; esac
if [ -n "$from" ] && [ ! -f "$from" ]; then printf 'gpu_check: no such file: %s\n' "$from" >&2; exit 2; fi

mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
[ -z "$from" ] || [ "$from" -ef "$out/bench_step.json" ] || cp "$from" "$out/bench_step.json" || exit 2
cd "$repo" || exit 2
. scripts/setup/environment.sh
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python; } || python=python3
ends=$((SECONDS + 60 * minutes))
bad=()

left() { echo $((ends - SECONDS)); }
part() { # name, command…: what it says goes to the screen and to OUT/name.log; ended when the time is up
    local name=$1 seconds
    shift
    seconds=$(left)
    printf '── %s (%s s left)\n' "$name" "$seconds"
    if [ "$seconds" -le 0 ]; then
        bad+=("$name: no time was left")
        return
    fi
    local limit=()
    ! command -v timeout >/dev/null 2>&1 || limit=(timeout --signal=INT --kill-after=30 "$seconds")
    "${limit[@]}" "$@" 2>&1 | tee "$out/$name.log"
    local code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || bad+=("$name: exit code $code")
}
parity_check() { # name, policy, program, arguments…: a check beside others; why it failed goes to OUT/NAME.failed
    local name=$1 policy=$2 compiled=true
    [ "$3" = compiled ] || compiled=false
    shift 3
    bad=()
    part "$name" "$python" -m lockstep parity "$config" "${data[@]}" --device "$device" --precision.policy "$policy" \
        --compile.enabled "$compiled" --train.batch-size 8 --train.micro-batch-size 4 --steps 2 \
        --json "$out/$name.json" --capsules "$out/capsules_$name" "$@" >/dev/null
    printf '%s' "${bad[*]-}" >"$out/$name.failed"
}
study() { # name, arguments…: a study beside others; why it failed goes to OUT/NAME.failed
    local name=$1
    shift
    bad=()
    part "$name" "$python" -m "lockstep.scripts.studies.$name" --device cuda "$@" >/dev/null
    printf '%s' "${bad[*]-}" >"$out/$name.failed"
}
wanted() { [ -z "$only" ] || [ "$only" = "$1" ]; }
in_minutes() { # so many seconds less than what is left
    local seconds=$(($(left) - $1))
    [ "$seconds" -gt 0 ] || seconds=1
    awk "BEGIN { print $seconds / 60 }"
}

if [ -n "$only" ]; then parts=("$only"); else parts=(tests parity sums bench); fi
"$python" -m lockstep.scripts.shared.needs "${parts[@]}" || exit 2

if [ -z "$tiny" ]; then
    device=cuda config=configs/quickstart.toml
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
        printf 'gpu_check: torch sees no CUDA device; --tiny runs the command on the CPU\n' >&2
        exit 2
    }
    bench=()
else
    device=cpu config=configs/bench-tiny.toml
    bench=(configs/bench-tiny.toml --rows fp32-eager attention-flash-eager attention-cudnn --repeat 2 --warmup 1)
fi

if wanted tests; then
    # Several at a time where pytest-xdist is there: compilers and the reference keep the CPU busy, not the GPU.
    several=()
    ! "$python" -c 'import xdist' 2>/dev/null || several=(-n 6 --dist loadfile)
    part gpu_tests "$python" -m pytest -m gpu parity_tests/gpu -v -rf -p no:cacheprovider \
        --junitxml "$out/gpu_tests.xml" ${several[@]+"${several[@]}"}
fi

if wanted parity; then
    data=(--data.source "$repo/core" --data.path "$out/data")
    part data "$python" -m lockstep data prepare "$config" --workers 1 "${data[@]}"
    policies="bf16 fp32 fp16 fp8_tensorwise fp8_rowwise fp8_delayed" programs="eager compiled"
    # Bounds of TF32 can only be measured on a GPU (scripts/studies/calibrate.py --device cuda); none are shipped yet.
    ! grep -q '"tf32/eager"' core/parity/measures/calibrated_bounds.json || policies="$policies tf32"
    [ -z "$tiny" ] || { policies=bf16 programs=eager; }
    checks=()
    # One with the reference on the same GPU, if JAX sees it: its products under "highest" (jax_backend/__init__.py).
    if [ -z "$tiny" ] && JAX_PLATFORMS=cuda,cpu "$python" -c 'import jax, lockstep.jax_backend; jax.devices("cuda")' 2>/dev/null; then
        checks+=("parity_reference_on_gpu bf16 eager --steps 1 --parity.reference-device cuda --parity.device-gb 8")
    fi
    for policy in $policies; do
        for program in $programs; do checks+=("parity_${policy}_$program $policy $program"); done
    done
    # A check keeps about four cores busy, with compilers and the reference, and the GPU hardly at all.
    at_a_time=$(($(getconf _NPROCESSORS_ONLN) / 4))
    for check in "${checks[@]}"; do
        while [ "$(jobs -rp | wc -l)" -ge $((at_a_time > 1 ? at_a_time : 1)) ]; do sleep 1; done
        # shellcheck disable=SC2086  # names and arguments are words of their own
        parity_check $check &
    done
    wait
    for check in "${checks[@]}"; do
        name=${check%% *}
        sed -n "s/^step [0-9]*: parity/$name: &/p" "$out/$name.log" 2>/dev/null
        said=$(cat "$out/$name.failed" 2>/dev/null) || said="$name: it ended without a word"
        rm -f "$out/$name.failed"
        [ -z "$said" ] || bad+=("$said")
    done
fi

if wanted sums; then
    # How the matrix units sum, beside the law that checks leave room for. A CPU has none: the page alone.
    page=()
    [ -z "$tiny" ] || { cp docs/results/unit_sums.json "$out/" && page=(--page); }
    part sums "$python" -m lockstep.scripts.studies.unit_sums --json "$out/unit_sums.json" ${page[@]+"${page[@]}"}
fi

if wanted bench; then
    # Half a minute for the table and for what ends late.
    part bench_step "$python" -m lockstep bench step "${bench[@]}" --resume --json "$out/bench_step.json" \
        --minutes "$(in_minutes 30)" "$@"
    [ ! -f "$out/bench_step.json" ] ||
        "$python" -m lockstep bench step --json "$out/bench_step.json" --page "$out/bench_step.md" ||
        bad+=("the page of the bench")
fi

large=configs/llama-1b.toml steps=256 batch=8 few=()
kernels=(--attention.kernel cudnn --loss.head one_kernel --loss.chunk 4096 --parity.reference-device cuda --parity.device-gb 40)
[ -z "$tiny" ] || { large=configs/bench-tiny.toml steps=8 batch=4 few=(--few 1 --many 1 --batch 1) kernels=(); }

if [ "$only" = large ]; then
    # A product of 2,048 terms and logits of 131,072 numbers, which the small models of the other checks do not have.
    data=(--data.source "$repo/core" --data.path "$out/large_data")
    part large_data "$python" -m lockstep data prepare "$large" --workers 1 "${data[@]}"
    for policy in bf16 fp8_tensorwise fp8_delayed; do
        part "large_$policy" "$python" -m lockstep parity "$large" "${data[@]}" --device "$device" \
            --precision.policy "$policy" --compile.enabled true "${kernels[@]}" --model.layers 2 --train.ranks 1 \
            --train.batch-size 2 --train.micro-batch-size 1 --train.curriculum "" --steps 1 --quick \
            --json "$out/large_$policy.json" --capsules "$out/capsules_large_$policy"
    done
fi

if [ "$only" = watch ]; then
    # They keep the CPU busy, with the reference and with truths in FP64, and the GPU hardly at all: side by side.
    part data "$python" -m lockstep data prepare "$config" --workers 2
    cores=$(getconf _NPROCESSORS_ONLN)
    jobs=$((cores > 8 ? cores / 4 : 2))
    OMP_NUM_THREADS=1 study watch_alarms --draws 4 --jobs "$jobs" --minutes "$(in_minutes 60)" &
    study operations &
    study honest_kernels --minutes "$(in_minutes 60)" &
    study families --jobs "$jobs" &
    wait
    cp docs/results/*_cuda.* docs/results/honest_kernels.* "$out/"
    for name in watch_alarms operations honest_kernels families; do
        tail -n 2 "$out/$name.log"
        said=$(cat "$out/$name.failed" 2>/dev/null) || said="$name: it ended without a word"
        rm -f "$out/$name.failed"
        [ -z "$said" ] || bad+=("$said")
    done
fi

for kind in bf16 fp8; do
    policy=bf16
    [ "$kind" = bf16 ] || policy=fp8_tensorwise
    if [ "$only" = "best_$kind" ]; then
        part "best_$kind" "$python" -m lockstep bench best "$large" --precision.policy "$policy" --device "$device" \
            --minutes "$(in_minutes 30)" "${few[@]}" --out "$out/best_$kind.toml"
    fi
done

if [ "$only" = curves ]; then
    # Real text; a step of few sequences, so that a run takes a minute or two.
    for kind in bf16 fp8; do
        [ -f "$out/best_$kind.toml" ] && continue
        printf 'gpu_check: no %s/best_%s.toml: call --only best_%s first\n' "$out" "$kind" "$kind" >&2
        exit 2
    done
    data=(--data.source "$repo/core" --data.path "$out/curve_data")
    part curve_data "$python" -m lockstep data prepare "$config" --workers 1 "${data[@]}"
    part curves "$python" -m lockstep.scripts.studies.two_curves "$out/best_bf16.toml" "$out/best_fp8.toml" --steps "$steps" \
        --minutes "$(in_minutes 30)" --json "$out/curves.json" "${data[@]}" --device "$device" \
        --train.batch-size "$batch" --train.micro-batch-size "$((batch / 2))" --train.ranks 1
fi

if [ ${#bad[@]} -gt 0 ]; then
    printf 'gpu_check: %s\n' "${bad[@]}" >&2
    exit 1
fi
printf 'gpu_check: all is good; everything is in %s\n' "$out"
