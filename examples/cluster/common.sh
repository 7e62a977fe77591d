# shellcheck shell=bash disable=SC2153
# The parts of a run on several nodes (one needs `opd run` alone). Sourced by an example's launch.sh,
# which sets
#   LEARNER_NODES STUDENT_NODES TEACHER_NODES   nodes of each role, in this order in HOSTS
#   LEARNER_GPUS STUDENT_GPUS TEACHER_GPUS      GPUs that a role uses on each of its nodes
#   STUDENT_TP TEACHER_TP                       GPUs of one server
#
#   launch.sh learner N | student N | teacher N | control      one part, on its node
#   launch.sh slurm                                            all of it, from a batch job
#
# Environment:
#   HOSTS           addresses of the nodes, separated by spaces, on the network that they share
#   STUDENT_MODEL TEACHER_MODEL    Hugging Face checkpoints, at the same path on every node
#   TRAIN HELDOUT   prompt files, for the controller; default: what the configuration says
#   SETTINGS        more --set values, separated by spaces: "run.max_steps=10 run.seed=2"
#   OVERWRITE=1     replace an earlier run in the same run.dir
#   OPD TORCHRUN    the programs; default: opd, torchrun
#   CONFIG          default: config.yaml beside launch.sh
#   MASTER_PORT     of torchrun; default 29500
#   NUMA_BINDING    torchrun's; default node; empty: none
#   STARTUP_S       longest wait for the servers; default 3600
#   DRY_RUN=1       print the commands instead
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
CONFIG=${CONFIG:-$HERE/config.yaml}
OPD=${OPD:-opd}
TORCHRUN=${TORCHRUN:-torchrun}
MASTER_PORT=${MASTER_PORT:-29500}
LEARNER_PORT=${LEARNER_PORT:-29400}
STUDENT_PORT=${STUDENT_PORT:-30000}
TEACHER_PORT=${TEACHER_PORT:-30100}
STARTUP_S=${STARTUP_S:-3600}

fail() {
  echo "launch.sh: $*" >&2
  exit 2
}

# Every command goes through here, so that DRY_RUN shows all of a run.
run() {
  if [[ -n ${DRY_RUN:-} ]]; then
    local line
    printf -v line '%q ' "$@"
    printf '%s\n' "$line" # one write: parts that start together do not mix
  else
    "$@"
  fi
}

# The same, in place of this shell: a signal sent to it reaches the program itself.
become() {
  [[ -z ${DRY_RUN:-} ]] || {
    run "$@"
    return
  }
  exec "$@"
}

# Address of node $2 of the role $1.
host_of() {
  local first=0
  case $1 in
    learner) ;;
    student) first=$LEARNER_NODES ;;
    teacher) first=$((LEARNER_NODES + STUDENT_NODES)) ;;
    *) fail "a role is learner, student or teacher, got $1" ;;
  esac
  echo "${hosts[first + $2]}"
}

read_hosts() {
  local wanted=$((LEARNER_NODES + STUDENT_NODES + TEACHER_NODES))
  [[ -n ${HOSTS:-} ]] || fail "HOSTS must list the addresses of the nodes"
  read -r -a hosts <<<"$HOSTS"
  if ((${#hosts[@]} != wanted)); then
    fail "HOSTS must list $wanted addresses (learner, student, teacher nodes), got ${#hosts[@]}"
  fi
}

# Layout of a role's servers: nodes, GPUs of a node, GPUs of a server, first port.
layout_of() {
  case $1 in
    student) nodes=$STUDENT_NODES gpus=$STUDENT_GPUS tp=$STUDENT_TP port=$STUDENT_PORT ;;
    teacher) nodes=$TEACHER_NODES gpus=$TEACHER_GPUS tp=$TEACHER_TP port=$TEACHER_PORT ;;
    *) fail "a server's role is student or teacher, got $1" ;;
  esac
  read -r -a gpus <<<"$gpus"
  per_node=$((${#gpus[@]} / tp))
}

# ["http://HOST:PORT",...] of a role's servers, for --set.
urls_of() {
  local nodes gpus tp port per_node node slot list=()
  layout_of "$1"
  for ((node = 0; node < nodes; node++)); do
    for ((slot = 0; slot < per_node; slot++)); do
      list+=("http://$(host_of "$1" "$node"):$((port + node * per_node + slot))")
    done
  done
  local IFS=,
  echo "[${list[*]}]"
}

# What every part must agree on: models and addresses. Servers and sockets bind to loopback unless
# they are told otherwise.
read_settings() {
  read_hosts
  settings=(
    --set "student.urls=$(urls_of student)"
    --set "teacher.urls=$(urls_of teacher)"
    --set "student.base_port=$STUDENT_PORT"
    --set "teacher.base_port=$TEACHER_PORT"
    --set "learner.listen_host=${hosts[0]}"
    --set "learner.listen_port=$LEARNER_PORT"
    --set "weight_sync.host=${hosts[0]}"
  )
  [[ -z ${STUDENT_MODEL:-} ]] || settings+=(--set "student.model=$STUDENT_MODEL")
  [[ -z ${TEACHER_MODEL:-} ]] || settings+=(--set "teacher.model=$TEACHER_MODEL")
  [[ -z ${TRAIN:-} ]] || settings+=(--set "data.train=$TRAIN")
  [[ -z ${HELDOUT:-} ]] || settings+=(--set "data.heldout=$HELDOUT")
  local setting
  for setting in ${SETTINGS:-}; do settings+=(--set "$setting"); done
}

# The servers of node $2 of the role $1; ends when one of them does.
servers() {
  local nodes gpus tp port per_node slot devices
  layout_of "$1"
  own_children
  for ((slot = 0; slot < per_node; slot++)); do
    devices=$(
      IFS=,
      echo "${gpus[*]:slot * tp:tp}"
    )
    become env "CUDA_VISIBLE_DEVICES=$devices" "$OPD" serve "$1" "$CONFIG" \
      --index $(($2 * per_node + slot)) --set "$1.host=$(host_of "$1" "$2")" "${settings[@]}" &
    [[ -z ${DRY_RUN:-} ]] || wait # in order
  done
  [[ -n ${DRY_RUN:-} ]] || wait -n
}

# The learner's ranks of its node $1.
learner() {
  local gpus binding=()
  read -r -a gpus <<<"$LEARNER_GPUS"
  [[ -z ${NUMA_BINDING-node} ]] || binding=("--numa-binding=${NUMA_BINDING-node}")
  become env "CUDA_VISIBLE_DEVICES=${LEARNER_GPUS// /,}" "$TORCHRUN" \
    --nnodes="$LEARNER_NODES" --nproc-per-node="${#gpus[@]}" --node-rank="$1" \
    --master-addr="${hosts[0]}" --master-port="$MASTER_PORT" "${binding[@]}" \
    -m megatron_opd.learner "$CONFIG" --controller "tcp://${hosts[0]}:$LEARNER_PORT" \
    "${settings[@]}"
}

# The controller, on the learner's first node, once every server answers.
control() {
  local deadline=$((SECONDS + STARTUP_S)) url urls
  urls="$(urls_of student),$(urls_of teacher)"
  for url in $(tr -d '[]' <<<"$urls" | tr , ' '); do
    [[ -z ${DRY_RUN:-} ]] || break
    until curl --silent --fail --max-time 10 --output /dev/null "$url/ready"; do
      ((SECONDS < deadline)) || fail "no server answers at $url after $STARTUP_S s"
      sleep 2
    done
  done
  run "$OPD" control "$CONFIG" "${settings[@]}" ${OVERWRITE:+--overwrite}
}

# Whatever this shell starts in the background ends with it, by force after a while: a server that is
# paused may not heed SIGTERM.
own_children() {
  trap end_children EXIT
  trap 'exit 143' TERM INT
}

end_children() {
  local children second
  mapfile -t children < <(jobs -p)
  ((${#children[@]})) || return 0
  kill "${children[@]}" 2>/dev/null || true
  for ((second = 0; second < 30; second++)); do
    [[ -n $(jobs -pr) ]] || break
    sleep 1
  done
  kill -KILL "${children[@]}" 2>/dev/null || true
}

# Everything from a batch job: a step for each part, on its node.
slurm() {
  local names name address node learners=()
  mapfile -t names < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
  HOSTS=
  for name in "${names[@]}"; do
    address=$(getent ahostsv4 "$name" | awk 'NR == 1 {print $1}')
    HOSTS+="${HOSTS:+ }${address:?no address of $name}"
  done
  export HOSTS
  own_children
  for ((node = 0; node < STUDENT_NODES; node++)); do
    step "${names[LEARNER_NODES + node]}" student "$node" &
  done
  for ((node = 0; node < TEACHER_NODES; node++)); do
    step "${names[LEARNER_NODES + STUDENT_NODES + node]}" teacher "$node" &
  done
  for ((node = 0; node < LEARNER_NODES; node++)); do
    step "${names[node]}" learner "$node" &
    learners+=($!)
  done
  step "${names[0]}" control
  wait "${learners[@]}" # the controller has told them to stop
}

# Part $2.. of the run on the node named $1. --overlap: the controller shares the learner's node.
# srun does not take --cpus-per-task from the job (Slurm >= 22.05).
step() {
  srun --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --nodelist="$1" \
    --overlap --export=ALL bash "$HERE/launch.sh" "${@:2}"
}

main() {
  local hosts=() settings=()
  case ${1:-} in
    learner | student | teacher)
      [[ ${2:-} =~ ^[0-9]+$ ]] || fail "$1 needs the number of its node, got '${2:-}'"
      read_settings
      if [[ $1 == learner ]]; then
        learner "$2"
      else
        servers "$1" "$2"
      fi
      ;;
    control)
      read_settings
      control
      ;;
    slurm) slurm ;;
    *) fail "give a part: learner N, student N, teacher N, control or slurm" ;;
  esac
}

# Reasons are in docs/cluster.md. A value that the environment already has is kept.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

main "$@"
