#!/usr/bin/env bash
# A Lockstep run over several nodes under Slurm: one torchrun a node, one rank a GPU.
#
#   sbatch docs/examples/cluster/slurm/train.sh configs/quickstart.toml [settings …]
#
# The repository, its environment and `runs/` must lie where every node has them by the same name; the data are read on
# the first node alone. The job's number is the launch's name: ranks that die are started anew by torchrun, and a job
# that fails or is taken off its nodes is queued again; either way the same command goes on from the last checkpoint.
#SBATCH --job-name=lockstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the end every rank is told; rank 0 finishes its step and writes a checkpoint.
#SBATCH --signal=TERM@300
set -uo pipefail

[ $# -ge 1 ] || { echo "usage: sbatch $0 CONFIG [settings …]" >&2; exit 2; }
per_node=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
ranks=$((SLURM_JOB_NUM_NODES * per_node))
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Two jobs may share the first node.
port=$((20000 + SLURM_JOB_ID % 20000))
requeues=${REQUEUES:-5}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$per_node" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID" \
    -m lockstep train "$@" --train.ranks "$ranks"
code=$?

# 0: finished. What cannot succeed (a setting that is wrong) fails the same way again, so not for ever.
if [ "$code" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeues" ]; then
    echo "ended with $code: queued again (${SLURM_RESTART_COUNT:-0} of $requeues before)"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
