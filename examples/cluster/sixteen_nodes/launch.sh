#!/usr/bin/env bash
# Sixteen nodes of 8 GPUs: HOSTS lists eight learner nodes, four student nodes, four teacher nodes.
LEARNER_NODES=8 LEARNER_GPUS="0 1 2 3 4 5 6 7"
STUDENT_NODES=4 STUDENT_GPUS="0 1 2 3 4 5 6 7" STUDENT_TP=8
TEACHER_NODES=4 TEACHER_GPUS="0 1 2 3 4 5 6 7" TEACHER_TP=8
# shellcheck source-path=SCRIPTDIR source=../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
