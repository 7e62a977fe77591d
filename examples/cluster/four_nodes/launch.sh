#!/usr/bin/env bash
# Four nodes of 8 GPUs: HOSTS lists two learner nodes, the student's, the teacher's.
LEARNER_NODES=2 LEARNER_GPUS="0 1 2 3 4 5 6 7"
STUDENT_NODES=1 STUDENT_GPUS="0 1 2 3 4 5 6 7" STUDENT_TP=2
TEACHER_NODES=1 TEACHER_GPUS="0 1 2 3 4 5 6 7" TEACHER_TP=8
# shellcheck source-path=SCRIPTDIR source=../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
