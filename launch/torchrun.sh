#!/bin/sh
# torchrun instead of DeepSpeed's launcher, one node:
#     launch/torchrun.sh 2 --plan run/plan.json --data corpus.jsonl --steps 100 --out run
# Several nodes: run it on each, with TORCHRUN="--nnodes 2 --node-rank K --master-addr HOST --master-port 29500".
# `frugal train --hostfile hosts --print torchrun ...` prints what to run on which.
set -eu
ranks=$1
shift
# shellcheck disable=SC2086  # TORCHRUN holds several words
exec torchrun --nproc-per-node "$ranks" ${TORCHRUN:---standalone} "$(dirname "$0")/train.py" "$@"
