#!/bin/sh
# Several nodes, OpenMPI:
#     MASTER_ADDR=node0 launch/openmpi.sh hosts --plan run/plan.json --data corpus.jsonl --steps 100 --out run
# `hosts` is DeepSpeed's hostfile, which OpenMPI reads, too; MASTER_ADDR is its first host. MPI only starts the ranks, they
# talk over NCCL or gloo. MPIRUN holds more words, such as "--mca plm_rsh_args '-p 2222'" or "-x NCCL_SOCKET_IFNAME=eth0".
set -eu
hostfile=$1
shift
eval "exec mpirun --hostfile \"\$hostfile\" --bind-to none -x MASTER_ADDR -x PATH ${MPIRUN:-} \
  python \"\$(dirname \"\$0\")/train.py\" \"\$@\""
