#!/bin/bash
# The controller, on the first node of the learner. It waits for servers and learner, and continues
# an earlier run from its newest checkpoint.
#
#   bash examples/cluster/torchrun/controller.sh
#
# What follows the script's name is passed on, e.g. --set run.max_steps=100.
set -euo pipefail

CONFIG=${CONFIG:-examples/cluster/four_nodes/config.yaml} # the same on every node
STUDENT_MODEL=${STUDENT_MODEL:-/models/Qwen3-30B-A3B}
TEACHER_MODEL=${TEACHER_MODEL:-/models/Qwen3-235B-A22B}
TRAIN=${TRAIN:-/data/train.jsonl}
HELDOUT=${HELDOUT:-/data/aime24.jsonl}
MASTER_ADDR=${MASTER_ADDR:-10.0.0.1}      # this node: learner node 0
CONTROLLER_PORT=${CONTROLLER_PORT:-29400}
STUDENT_URLS=${STUDENT_URLS:-http://10.0.0.3:30000,http://10.0.0.3:30001} # one for each server
TEACHER_URLS=${TEACHER_URLS:-http://10.0.0.4:30100}
KEYS=${KEYS:-$HOME/opd-keys}              # has student.key and teacher.key, gets run.keys

OPD_STUDENT_KEY=$(< "$KEYS/student.key")
OPD_TEACHER_KEY=$(< "$KEYS/teacher.key")
export OPD_STUDENT_KEY OPD_TEACHER_KEY
export MEGATRON_OPD_KEYS_FILE=$KEYS/run.keys

exec opd control "$CONFIG" --auto-resume \
  --set student.model="$STUDENT_MODEL" --set teacher.model="$TEACHER_MODEL" \
  --set data.train="$TRAIN" --set data.heldout="$HELDOUT" \
  --set student.urls="[$STUDENT_URLS]" --set student.api_key_env=OPD_STUDENT_KEY \
  --set teacher.urls="[$TEACHER_URLS]" --set teacher.api_key_env=OPD_TEACHER_KEY \
  --set learner.listen_host="$MASTER_ADDR" --set learner.listen_port="$CONTROLLER_PORT" \
  --set weight_sync.host="$MASTER_ADDR" \
  "$@"
