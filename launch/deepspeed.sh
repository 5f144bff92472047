#!/bin/sh
# Several nodes, DeepSpeed's launcher over pdsh. `frugal train --hostfile hosts` does this and looks at the hosts first.
#     launch/deepspeed.sh hosts --plan run/plan.json --data corpus.jsonl --steps 100 --out run
# `hosts` has a line `NAME slots=GPUS` for each node; `frugal plan --hostfile hosts` also reads what stands behind a `#`:
# `NAME slots=4  # mem=12G gpu=rtx3060-12g host-mem=64G disk=500G`. All nodes see the same folders, and rank 0's node
# logs in to the others without a password. What the ranks need from the environment goes into ./.deepspeed_env, one
# NAME=VALUE a line. DEEPSPEED holds more words for the launcher, such as "--ssh_port 2222 --master_addr 10.0.0.1".
set -eu
hostfile=$1
shift
# shellcheck disable=SC2086  # DEEPSPEED holds several words
exec deepspeed --hostfile "$hostfile" ${DEEPSPEED:-} "$(dirname "$0")/train.py" "$@"
