#!/bin/bash
# One teacher server, for opd control on another node. Once for each server, where its GPUs are:
#
#   NODE_ADDR=10.0.0.4 INDEX=0 bash examples/cluster/torchrun/teacher.sh
#
# What follows the script's name is passed on, e.g. --set teacher.mem_fraction_static=0.8.
set -euo pipefail

CONFIG=${CONFIG:-examples/cluster/four_nodes/config.yaml} # the same on every node
TEACHER_MODEL=${TEACHER_MODEL:-/models/Qwen3-235B-A22B}
NODE_ADDR=${NODE_ADDR:?must be the address of this node on the private network}
INDEX=${INDEX:-0}            # of teacher.servers, as in student.sh
KEYS=${KEYS:-$HOME/opd-keys} # has teacher.key

OPD_TEACHER_KEY=$(< "$KEYS/teacher.key")
export OPD_TEACHER_KEY

exec opd serve teacher "$CONFIG" --index "$INDEX" \
  --set teacher.model="$TEACHER_MODEL" \
  --set teacher.host="$NODE_ADDR" \
  --set teacher.api_key_env=OPD_TEACHER_KEY \
  "$@"
