#!/usr/bin/env bash
# From nothing to a trained, checked model and its report. Run it again: it goes on where it was, or says that it is done.
#
#   scripts/quickstart.sh           set up, prepare data, train (or resume), report
#   scripts/quickstart.sh --fresh   the same, but the run starts again from step 0
#   scripts/quickstart.sh --precision.policy fp32
#                                   in this precision; without it a new run is in bf16
#
# Ends 0; 1 if a check disagreed; 2 if something is missing, or fewer than half of the checks could be made; 130 after
# Ctrl-C (with a checkpoint).
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
config=configs/quickstart.toml
run=runs/quickstart
. "$repo/scripts/setup/say.sh"

fresh=
policy=
while [ $# -gt 0 ]; do
    case "$1" in
        --fresh) fresh=yes ;;
        --precision.policy=?*) policy=${1#*=} ;;
        *)
            if [ "$1" = --precision.policy ] && [ -n "${2:-}" ]; then
                policy=$2
                shift
            else
                printf 'usage: scripts/quickstart.sh [--fresh] [--precision.policy NAME]\n' >&2
                [ "$1" = --help ] || [ "$1" = -h ] && exit 0
                exit 2
            fi
            ;;
    esac
    shift
done

bash "$repo/scripts/setup/setup_env.sh"
cd "$repo"
. scripts/setup/environment.sh
lockstep=.venv/bin/lockstep

is_finished() {
    .venv/bin/python -c 'import json, sys; sys.exit(json.load(open(sys.argv[1])).get("finished") is not True)' \
        "$run/run.json" 2>/dev/null
}

info() { cat "$run/run.json" 2>/dev/null || true; }

has_checkpoint() { compgen -G "$run/checkpoints/step_*" >/dev/null; }

train() { # leaves the exit code in $trained, so that a run that was not checked, or not well, still gets its report
    local before
    before=$(info)
    trained=0
    "$lockstep" train "$@" || trained=$?
    [ "$trained" -le 1 ] && return
    # Finished by this call: a run that could not start leaves an earlier one as it was.
    [ "$trained" -eq 2 ] && [ "$(info)" != "$before" ] && is_finished && return
    [ "$trained" -ne 130 ] || say "stopped; scripts/quickstart.sh goes on from the checkpoint"
    exit "$trained"
}

shown() { # what this run has shown, where its report is, and what to do next
    local words
    words=$(
        .venv/bin/python - "$run/parity.jsonl" 2>/dev/null <<'END' || true
import json, sys
checks = [json.loads(line) for line in open(sys.argv[1]) if line.strip()]
count = {verdict: sum(check["verdict"] == verdict for check in checks) for verdict in ("agreed", "disagreed", "skipped")}
said = f"{count['agreed']} of {len(checks)} checks against the JAX reference agreed"
said += "".join(f", {count[verdict]} {verdict}" for verdict in ("disagreed", "skipped") if count[verdict])
print(f"a model was trained in torch, and {said}")
END
    )
    say "${words:-a model was trained in torch; there is no record of checks}"
    say "the report: $repo/$run/report.html"
    say "next:"
    printf '  %-52s # %s\n' \
        '.venv/bin/lockstep demo' 'a planted fault, found' \
        ".venv/bin/lockstep sample $run --prompt \"def \"" 'the model writes' \
        '.venv/bin/lockstep plan configs/llama-1b.toml' 'what 1.24B takes'
}

trained=0
goes_on() { [ -z "$fresh" ] && { is_finished || has_checkpoint; }; }
if [ -n "$policy" ] && goes_on; then
    say "$run keeps its precision; for a new run add --fresh" >&2
    exit 2
fi
if [ -z "$fresh" ] && is_finished; then
    say "$run is finished: its report is made anew. To train again from step 0: scripts/quickstart.sh --fresh"
else
    "$lockstep" data prepare "$config"
    if [ -z "$fresh" ] && has_checkpoint; then
        say "$run was interrupted: going on from its last checkpoint"
        train --resume "$run"
    else
        # An earlier run without a checkpoint has nothing to go on from.
        train "$config" --overwrite ${policy:+--precision.policy "$policy"}
    fi
fi
"$lockstep" report "$run"
shown
exit "$trained"
