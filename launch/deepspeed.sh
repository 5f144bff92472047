#!/bin/sh
# Several nodes, DeepSpeed's launcher over pdsh:
#     launch/deepspeed.sh hosts --plan run/plan.json --data corpus.jsonl --steps 100 --out run
# `hosts` has a line `NAME slots=GPUS` for each node; `frugal plan --hostfile hosts` also reads what stands behind a `#`:
# `NAME slots=4  # mem=12G gpu=rtx3060-12g host-mem=64G disk=500G`. All nodes see the same folders, and rank 0's node logs
# in to the others without a password. What the ranks need from the environment goes into ./.deepspeed_env, one
# NAME=VALUE a line.
set -eu
hostfile=$1
shift
exec deepspeed --hostfile "$hostfile" "$(dirname "$0")/train.py" "$@"
