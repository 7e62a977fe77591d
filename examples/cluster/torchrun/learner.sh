#!/bin/bash
# One node of the learner. On every learner node, node 0 being the one with MASTER_ADDR:
#
#   NODE_RANK=0 bash examples/cluster/torchrun/learner.sh
#   NODE_RANK=1 bash examples/cluster/torchrun/learner.sh
#
# NNODES * GPUS_PER_NODE must be the ranks of learner.parallel. What follows the script's name is
# passed on; settings that change the training must then be the controller's too.
set -euo pipefail

CONFIG=${CONFIG:-examples/cluster/four_nodes/config.yaml} # the same on every node
STUDENT_MODEL=${STUDENT_MODEL:-/models/Qwen3-30B-A3B}
MASTER_ADDR=${MASTER_ADDR:-10.0.0.1}          # learner node 0, where the controller is too
MASTER_PORT=${MASTER_PORT:-29500}             # torchrun's store
CONTROLLER_PORT=${CONTROLLER_PORT:-29400}     # learner.listen_port of the controller
NNODES=${NNODES:-2}
NODE_RANK=${NODE_RANK:?must be 0 on MASTER_ADDR, 1 on the next node of the learner, and so on}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
INTERFACE=${INTERFACE:-eth0}                  # of the private network: NCCL and gloo listen there
NUMA_BINDING=${NUMA_BINDING-node}             # ranks near their GPUs, by numactl; empty: not bound
KEYS=${KEYS:-$HOME/opd-keys}                  # gets run.keys from the controller

# each rank reads its keys there, and waits until they are
export MEGATRON_OPD_KEYS_FILE=$KEYS/run.keys
# what `opd run` would set; docs/cluster.md says why
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# torchrun, with a store that listens on MASTER_ADDR alone; torchrun's own listens everywhere
python -m megatron_opd.learner.torchrun \
  --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$GPUS_PER_NODE" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
  ${NUMA_BINDING:+--numa-binding="$NUMA_BINDING"} \
  -m megatron_opd.learner "$CONFIG" --controller "tcp://$MASTER_ADDR:$CONTROLLER_PORT" \
  --set student.model="$STUDENT_MODEL" \
  --set weight_sync.host="$MASTER_ADDR" \
  --set cluster.interface="$INTERFACE" \
  "$@"
