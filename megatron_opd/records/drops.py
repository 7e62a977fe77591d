"""Declares why a sample can be dropped: the word that is counted, its meaning, what to do about it.

A word is a key of `samples_dropped` in summary.json; controller/pipeline.py counts every drop.
`opd check` prints those that a run can have, docs/drops.md all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Where = Literal[
    "any", "teacher", "reward", "group", "spread", "overlong", "sites", "environment", "turn"
]
"""Which runs can have it: all, or those with teachers, verifiers, groups, ..."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Describes one reason. remedy: what to do where it happens often."""

    word: str
    where: Where
    meaning: str
    remedy: str


DROPS: dict[str, Drop] = {}
"""All reasons, by their word, in the order of a sample's life."""


def _drop(word: str, where: Where, meaning: str, remedy: str) -> str:
    """Declare a reason; its word is what the code passes on."""
    assert word not in DROPS, word
    DROPS[word] = Drop(word, where, meaning, remedy)
    return word


ABORTED = _drop(
    "aborted",
    "any",
    "a student server gave the request up",
    "see logs/student*.log; fewer rollout.concurrency where it ran out of KV cache",
)
EMPTY_RESPONSE = _drop(
    "empty_response",
    "any",
    "the response has no token",
    "see that the prompt does not end where an answer ends (opd check prints the first one)",
)
ROLLOUT_TIMED_OUT = _drop(
    "timed_out",
    "any",
    "a student server did not answer in student.request_timeout_s",
    "raise it, or lower rollout.max_new_tokens or rollout.concurrency",
)
STUDENT_UNREACHABLE = _drop(
    "student_unreachable",
    "any",
    "every attempt failed, the last because no student server could be reached",
    "see logs/student*.log and the network to student.urls",
)
STUDENT_UNAVAILABLE = _drop(
    "student_unavailable",
    "any",
    "every attempt failed, the last because a student server answered 429 or 5xx",
    "see logs/student*.log; lower rollout.concurrency, add student servers, raise rollout.attempts",
)
OVERLONG = _drop(
    "overlong",
    "overlong",
    "the response was cut at its limit of tokens",
    "raise rollout.max_new_tokens, or another selection.overlong",
)
ENVIRONMENT_FAILED = _drop(
    "environment_failed",
    "environment",
    "an environment raised an exception",
    "the first one is on the terminal; play the environment on that row",
)
ENVIRONMENT_TIMED_OUT = _drop(
    "environment_timed_out",
    "environment",
    "an environment did not answer a turn in environment.timeout_s, or an agent did not go on",
    "raise it, or see what the environment waits for",
)
ENVIRONMENT_DIED = _drop(
    "environment_died",
    "environment",
    "the process of an environment ended, or took more than environment.memory_bytes",
    "raise it, or see that the environment neither exits nor crashes the interpreter",
)
ENVIRONMENT_BAD_REPLY = _drop(
    "environment_bad_reply",
    "environment",
    "an environment answered with something that is no messages, no end, or not to be rendered; an "
    "agent returned no finite number, or without a call",
    "the first one is on the terminal; see what start and step, or the agent's function, return",
)
ENVIRONMENT_TOO_LONG = _drop(
    "environment_too_long",
    "environment",
    "an environment said more than environment.message_bytes, or left no room for a turn",
    "raise it, or environment.max_tokens; let tools cut what they answer",
)
ENVIRONMENT_NO_REWARD = _drop(
    "environment_no_reward",
    "turn",
    "an environment ended a trajectory and gave none of its turns a reward (environment.credit)",
    "return Said(messages, reward) or TrajectoryEnd(reward), or environment.credit: trajectory",
)
TEACHER_UNREACHABLE = _drop(
    "teacher_unreachable",
    "teacher",
    "every attempt failed, the last because no connection to a teacher server held",
    "see logs/teacher*.log and the network to the teacher's urls",
)
TEACHER_UNAVAILABLE = _drop(
    "teacher_unavailable",
    "teacher",
    "every attempt failed, the last because a teacher server answered 429 or 5xx, or gave it up",
    "lower scoring.concurrency, add teacher servers, raise scoring.attempts",
)
TEACHER_TIMED_OUT = _drop(
    "teacher_timed_out",
    "teacher",
    "a teacher server did not answer in its request_timeout_s",
    "raise it, or lower scoring.concurrency",
)
TEACHER_REFUSED = _drop(
    "teacher_refused",
    "teacher",
    "a teacher server answered with an error of the request's",
    "the first one is on the terminal, with the server's words",
)
TEACHER_BAD_REPLY = _drop(
    "teacher_bad_reply",
    "teacher",
    "a teacher's reply is none of the plugin's",
    "serve teachers with opd serve, of the same release",
)
TEACHER_UNKNOWN_ID = _drop(
    "teacher_unknown_id",
    "teacher",
    "the teacher selected a token id that the student does not have",
    "use a support of the student's, or a teacher with the student's vocabulary",
)
TEACHER_UNALIGNED = _drop(
    "teacher_unaligned",
    "teacher",
    "no token of a response lies on tokens of the teacher's, whose tokenizer is another one",
    "let responses be text that the teacher's tokenizer keeps as it is",
)
TEACHER_MISSHAPEN = _drop(
    "teacher_misshapen",
    "teacher",
    "a reply has another number of scores than ids that were asked for",
    "serve teachers with opd serve, of the same release",
)
TEACHER_NAN = _drop(
    "teacher_nan",
    "teacher",
    "a teacher's log-prob is not a number",
    "see the teacher's dtype and its checkpoint (opd check --data reads all weights)",
)
TEACHER_INFINITE = _drop(
    "teacher_infinite",
    "teacher",
    "a teacher gives a token the probability 0 that the student sampled",
    "let the teacher sample with top_p 1 and no banned tokens; see scoring.temperature",
)
NO_ANSWER = _drop(
    "no_answer",
    "reward",
    "the objective reads a reward, and the row has no answer to compare with",
    "data.answer_key, or rows that have one",
)
VERIFIER_TIMED_OUT = _drop(
    "verifier_timed_out",
    "reward",
    "a verifier took longer than verifier.timeout_s",
    "raise it, or verifier.workers",
)
VERIFIER_OUT_OF_MEMORY = _drop(
    "verifier_out_of_memory",
    "reward",
    "a verifier took more than verifier.memory_bytes",
    "raise it, or see what the verifier keeps",
)
VERIFIER_FAILED = _drop(
    "verifier_failed",
    "reward",
    "a verifier raised an exception",
    "the first one is on the terminal; try the verifier on that row",
)
VERIFIER_DIED = _drop(
    "verifier_died",
    "reward",
    "the process of a verifier ended",
    "see that the verifier neither exits nor crashes the interpreter",
)
VERIFIER_BAD_REWARD = _drop(
    "verifier_bad_reward",
    "reward",
    "a verifier returned something else than a bool or a number in [0, 1]",
    "scale its rewards",
)
GROUP_INCOMPLETE = _drop(
    "group_incomplete",
    "group",
    "another response to the same prompt was dropped, and the objective compares all of them",
    "see the reason of the first one",
)
ALL_RIGHT = _drop(
    "all_right",
    "spread",
    "all responses to the prompt have the full reward: nothing to compare",
    "harder prompts, or data.curriculum",
)
ALL_WRONG = _drop(
    "all_wrong",
    "spread",
    "all responses to the prompt have no reward: nothing to compare",
    "easier prompts, data.curriculum, or a larger rollout.group_size",
)
NO_REWARD_SPREAD = _drop(
    "no_reward_spread",
    "spread",
    "the rewards of all responses to the prompt are (nearly) equal",
    "a lower selection.groups.min_spread, or a verifier that tells more apart",
)
TOO_LATE = _drop(
    "too_late",
    "sites",
    "a site's sample came more than sites.max_delay_s after it was sampled",
    "raise it, lower sites.members.NAME.concurrency, sites.link.compression, a faster link",
)
TOO_STALE = _drop(
    "too_stale",
    "sites",
    "a site's sample is older than any update may train on",
    "raise sites.max_staleness (with permits schedule.max_staleness), or a faster link",
)
INCOMPLETE_BATCH = _drop(
    "incomplete_batch",
    "any",
    "fewer samples than a batch were left when the prompts ended",
    "a number of prompts that buffer.batch_size divides",
)
ENVIRONMENT_REASONS = tuple(word for word in DROPS if word.startswith("environment_"))
VERIFIER_REASONS = tuple(word for word in DROPS if word.startswith("verifier_"))
GROUP_REASONS = (ALL_RIGHT, ALL_WRONG, NO_REWARD_SPREAD)
"""Why a whole group is thrown away for its rewards."""
