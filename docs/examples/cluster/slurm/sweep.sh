#!/usr/bin/env bash
# Sweep over the GPUs of several nodes under Slurm: Ray Tune places the trials, one a GPU.
#
#   sbatch docs/examples/cluster/slurm/sweep.sh configs/quickstart.toml --vary optim.peak-lr=1e-4:3e-3:log --trials 64
#
# The repository, its environment, the data and `sweeps/` must lie where every node has them by the same name. A job that
# is queued again, or submitted again, goes on: finished trials stay, others go on from their checkpoints.
#SBATCH --job-name=lockstep-sweep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

[ $# -ge 1 ] || { echo "usage: sbatch $0 CONFIG --vary KEY=VALUES … [settings …]" >&2; exit 2; }
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_START="--num-cpus=${SLURM_CPUS_PER_TASK:-1} --num-gpus=${SLURM_GPUS_ON_NODE:-1}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
# srun hands it on; nobody else can use this Ray.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
# Slurm runs a copy of this script: the one beside it is found from the folder of the submission.
exec srun --kill-on-bad-exit=1 bash "${LOCKSTEP_EXAMPLES:-docs/examples/cluster}/on_ray.sh" \
    "$first:$((20000 + SLURM_JOB_ID % 20000))" "$SLURM_JOB_NUM_NODES" \
    lockstep sweep "$@" --engine ray --ray-address auto --gpus "${GPUS_PER_TRIAL:-1}"
