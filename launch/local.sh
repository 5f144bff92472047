#!/bin/sh
# One node, DeepSpeed's launcher:  launch/local.sh 2 --plan run/plan.json --data corpus.jsonl --steps 100 --out run
# The first argument is the plan's number of GPUs (for a plan with --device cpu: of processes).
set -eu
ranks=$1
shift
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( $(nproc) / ranks > 0 ? $(nproc) / ranks : 1 ))}"
exec deepspeed --num_gpus "$ranks" "$(dirname "$0")/train.py" "$@"
