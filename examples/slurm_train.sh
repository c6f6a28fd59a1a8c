#!/bin/bash
# Trains on several hosts under Slurm: one torchrun on each, which starts a worker for every GPU.
#
#   sbatch --nodes 4 examples/slurm_train.sh runs/big --preset small --ep 8 --steps 2000
#
# The first argument is the run's directory, on a file system that all hosts share; the others are
# those of `moe-graphs train`. Submitted again, the run goes on from its last checkpoint.
#SBATCH --job-name=moe_graphs
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue

set -euo pipefail
OUT=$1
shift
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RESUME=()
if compgen -G "$OUT/checkpoints/step_*" > /dev/null; then
    RESUME=(--resume "$OUT")
fi

# A worker that dies ends all of them; torchrun starts them anew, and they go on from the last
# checkpoint in --out by themselves.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:29500" \
    --rdzv-id "$SLURM_JOB_ID" \
    -m moe_graphs train --out "$OUT" --checkpoint-every 200 "${RESUME[@]}" "$@"
