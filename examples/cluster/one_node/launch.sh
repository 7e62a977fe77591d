#!/usr/bin/env bash
# One node of 8 GPUs. Run `launch.sh all` on it; common.sh has the rest.
export HOSTS=${HOSTS:-127.0.0.1}
LEARNER_NODES=1 LEARNER_GPUS="6 7"
STUDENT_NODES=1 STUDENT_GPUS="0 1 2 3 4" STUDENT_TP=1
TEACHER_NODES=1 TEACHER_GPUS="5" TEACHER_TP=1
# shellcheck source-path=SCRIPTDIR source=../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
