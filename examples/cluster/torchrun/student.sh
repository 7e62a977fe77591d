#!/bin/bash
# One student server, for opd control on another node. Once for each server, where its GPUs are:
#
#   NODE_ADDR=10.0.0.3 INDEX=0 bash examples/cluster/torchrun/student.sh
#
# What follows the script's name is passed on, e.g. --set student.mem_fraction_static=0.85.
set -euo pipefail

CONFIG=${CONFIG:-examples/cluster/four_nodes/config.yaml} # the same on every node
STUDENT_MODEL=${STUDENT_MODEL:-/models/Qwen3-30B-A3B}
NODE_ADDR=${NODE_ADDR:?must be the address of this node on the private network}
INDEX=${INDEX:-0}        # of student.servers: its port is base_port + INDEX, its GPUs the INDEX-th
                         # block of student.tp on this node (from GPU 0 again after the last)
KEYS=${KEYS:-$HOME/opd-keys} # has student.key

OPD_STUDENT_KEY=$(< "$KEYS/student.key")
export OPD_STUDENT_KEY

exec opd serve student "$CONFIG" --index "$INDEX" \
  --set student.model="$STUDENT_MODEL" \
  --set student.host="$NODE_ADDR" \
  --set student.api_key_env=OPD_STUDENT_KEY \
  "$@"
