#!/usr/bin/env bash
# Prepare data on several nodes under Slurm: Ray on all of them, one shard a core at a time.
#
#   sbatch docs/examples/cluster/slurm/prepare.sh configs/llama-1b.toml --data.source /shared/fineweb-edu [settings …]
#
# The repository, its environment, the source and `data.path` must lie where every node has them by the same name. A node
# that dies costs the shards that it was writing. A job that is queued again, or submitted again, goes on.
#SBATCH --job-name=lockstep-prepare
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

[ $# -ge 1 ] || { echo "usage: sbatch $0 CONFIG [settings …]" >&2; exit 2; }
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_START="--num-cpus=${SLURM_CPUS_PER_TASK:-1}"
# srun hands it on; nobody else can use this Ray.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
# Slurm runs a copy of this script: the one beside it is found from the folder of the submission.
exec srun --kill-on-bad-exit=1 bash "${LOCKSTEP_EXAMPLES:-docs/examples/cluster}/on_ray.sh" \
    "$first:$((20000 + SLURM_JOB_ID % 20000))" "$SLURM_JOB_NUM_NODES" \
    lockstep data prepare "$@" --engine ray --ray-address auto
