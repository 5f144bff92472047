#!/bin/sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --signal=USR1@300
# Several nodes, SLURM; change the lines above to what was planned, `frugal plan --nodes 2 --gpus 4 ...`:
#     sbatch launch/slurm.sh --plan run/plan.json --data corpus.jsonl --steps 100 --out run
# Five minutes before the time is up SLURM sends SIGUSR1, and the run saves its step and ends; continue with --resume.
set -eu
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
exec srun --kill-on-bad-exit=1 python "${LAUNCH:-launch}/train.py" "$@"
