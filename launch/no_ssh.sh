#!/bin/sh
# Several nodes without ssh: run it on each, with the node's number, from 0, and the address of node 0.
#     launch/no_ssh.sh hosts 0 node0 --plan run/plan.json --data corpus.jsonl --steps 100 --out run
#     launch/no_ssh.sh hosts 1 node0 --plan run/plan.json --data corpus.jsonl --steps 100 --out run
# `frugal train --hostfile hosts --print no-ssh ...` prints these lines. Ranks wait 5 minutes for each other.
set -eu
hostfile=$1 number=$2 address=$3
shift 3
exec deepspeed --hostfile "$hostfile" --no_ssh --node_rank "$number" --master_addr "$address" \
  --master_port "${MASTER_PORT:-29500}" "$(dirname "$0")/train.py" "$@"
