#!/usr/bin/env bash
# Run a command over Ray on several nodes: each node calls this with the same words, and the first one runs the command.
#
#   on_ray.sh HOST:PORT NODES COMMAND …
#
# HOST is the first node: SLURM_PROCID or JOB_COMPLETION_INDEX is 0 there. RAY_AUTH_TOKEN is the same secret on all nodes:
# who can reach a Ray can run anything on it. RAY_START holds more options of `ray start`.
# When the command ends, Ray ends on all nodes, with every other Ray of this user there. Ends with the command's code.
set -uo pipefail

[ $# -ge 3 ] || { echo "usage: $0 HOST:PORT NODES COMMAND …" >&2; exit 2; }
address=$1 nodes=$2
shift 2
number=${SLURM_PROCID:-${JOB_COMPLETION_INDEX:-0}}
[ -n "${RAY_AUTH_TOKEN:-}" ] || { echo "$0: RAY_AUTH_TOKEN is not set" >&2; exit 2; }
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# Seconds.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-600}
host=${address%:*} port=${address##*:}
patience=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT}

# A node's name may be known late, and symmetric-run waits some seconds for the first node's Ray, no longer.
wait_for() { # what, command
    until "${@:2}" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$patience" ] || { echo "$0: $1 is not there after $patience s" >&2; exit 2; }
        sleep 1
    done
}
wait_for "the name $host" getent ahosts "$host"
if [ "$number" -ne 0 ]; then
    wait_for "Ray at $address" bash -c "exec 3<>/dev/tcp/$host/$port"
fi

code_of_command=$(mktemp)
trap 'rm -f "$code_of_command"' EXIT

# shellcheck disable=SC2086,SC2016  # options are several words; the inner shell expands its own
ray symmetric-run --address "$address" --min-nodes "$nodes" ${RAY_START:-} -- \
    bash -c '"$@"; echo $? > "$0"' "$code_of_command" "$@"
code=$?

# Where the first node's Ray does not start, symmetric-run ends with 0 and has run nothing.
if [ "$number" -eq 0 ]; then
    code=$(cat "$code_of_command")
fi
exit "${code:-2}"
