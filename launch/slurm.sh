#!/bin/sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Several nodes, SLURM; change the lines above to what was planned, `frugal plan --nodes 2 --gpus 4 ...`:
#     sbatch launch/slurm.sh --plan run/plan.json --data corpus.jsonl --steps 100 --out run
# One task a node starts that node's ranks; nodes may differ. Five minutes before the time is up SLURM sends SIGUSR1:
# the run saves its step, and the job is queued again and resumes. It also resumes after a lost node or a preemption.
# In an array each task is a run, `%a` in the words its number: sbatch --array 0-1 launch/slurm.sh ... --out run-%a
set -eu
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  export MASTER_PORT=$((${MASTER_PORT:-29500} + SLURM_ARRAY_TASK_ID % 1000)) # tasks may share a node
  for word; do
    shift
    set -- "$@" "$(printf '%s\n' "$word" | sed "s/%a/$SLURM_ARRAY_TASK_ID/g")"
  done
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
code=0
srun "${PYTHON:-python}" -m frugal.launch.one_node "$@" || code=$?
# 138 is 128 + SIGUSR1: the run is saved, and not done.
if [ "$code" = 138 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
