"""Records some rollouts of every update, token by token, in RUN_DIR/rollouts.jsonl.

The event loop only picks them: text and rows are made by one thread, in order. A row is written
whole or not at all. Which samples are recorded follows from their batch alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.metrics.observers import RunObserver
from megatron_opd.metrics.sinks import RowFile
from megatron_opd.metrics.token_texts import Decode, token_texts
from megatron_opd.metrics.types import Accounting, Depths, UpdateFigures, WeightSyncReport
from megatron_opd.records.branches import Branch
from megatron_opd.records.types import (
    AnyRollout,
    AnySample,
    Batch,
    FloatArray,
    HeldRollout,
    HeldSample,
    Prompt,
    Rollout,
    Sample,
)

DIGITS = 4
"""Decimals of a recorded log-prob: 1e-4 nats, in about 8 bytes."""

Seen = Prompt | AnyRollout | AnySample
"""What is known of a sample: how far it has come."""
Fetch = Callable[[HeldRollout | HeldSample], Future[Rollout | Sample]]


class TurnRow(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one turn of a trajectory; figures as in records.TurnFigures.

    start: its first token. sequence: where it was sampled. branch: why it begins it. calls: (name,
    arguments as JSON, error) of each tool call; error: None where it was made.
    """

    start: int
    sequence: int
    branch: Branch
    reward: float | None
    sampling_s: float
    waiting_s: float
    environment_s: float
    cached: int
    answered_by: str
    calls: list[tuple[str, str, str | None]]


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one sample that was trained on or dropped; a line of rollouts.jsonl.

    update: the one that trained on it; of a dropped sample the first that was not done yet.
    version: the learner's when it trained; None: dropped. prompt: as the student read it, chat
    template included; None: not known, as the run was resumed since. teacher_prompt: as the teacher
    read it, None where that is the same or not known. given: (t, text), what the
    student was given in front of its token t, the prompt excepted. tokens: texts of the T sampled
    tokens, whose concatenation is the response. sampler_logp, teacher_logp: nats by token;
    teacher_logp is None where no teacher was asked, and None of a token that a teacher of another
    tokenizer has not scored. spans: (version, start, stop) covering [0, T).
    staleness_versions: of the oldest token. turns: of a trajectory with an environment, and
    played_s, the seconds from its beginning to its end; none and None of others. teacher_version:
    see Sample. chunked: teacher_logp is sampler_logp and the log-ratio of the token's chunk
    (scoring.alignment).
    """

    update: int
    uid: int
    version: int | None
    teacher: str
    engine: str
    reward: float | None
    staleness_versions: int | None
    finish_reason: str | None
    drop_reason: str | None
    drop_detail: str | None
    unix_time_s: float
    spans: list[tuple[int, int, int]]
    prompt: str | None
    teacher_prompt: str | None = None
    given: list[tuple[int, str]] = []
    turns: list[TurnRow] = []
    played_s: float | None = None
    tokens: list[str]
    sampler_logp: list[float]
    teacher_logp: list[float | None] | None
    teacher_version: int | None = None
    chunked: bool = False


class RolloutRecord(RunObserver):
    """Writes rows for `per_update` samples of every batch, and for as many dropped ones.

    Args:
        path: rollouts.jsonl; appended to.
        decode: turns token ids into text; called by another thread.
        per_update: samples of a batch to record, and the most dropped samples between two updates.
        fetch: asks for the arrays of what a data worker holds.
        updates: those that earlier processes of a resumed run made.
        decode_teacher: the same for ids of a teacher of another tokenizer; None: there is none.
    """

    def __init__(
        self,
        path: Path,
        decode: Decode,
        per_update: int,
        fetch: Fetch | None = None,
        updates: int = 0,
        decode_teacher: Decode | None = None,
    ) -> None:
        self._updates = updates
        self._fetch = fetch
        self._file = RowFile(path)
        self._decode, self._per_update = decode, per_update
        self._decode_teacher = decode_teacher or decode
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._begun: deque[Future[None]] = deque()
        self._asked: deque[Future[Rollout | Sample]] = deque()
        self._seen: dict[int, Seen] = {}
        self._drops = 0
        """Recorded since the last update."""

    def admitted(self, prompt: Prompt) -> None:
        """Keep how far a sample has come, in case it is dropped."""
        self._seen[prompt.uid] = prompt

    def rolled_out(self, rollout: AnyRollout) -> None:
        """Keep how far a sample has come."""
        self._seen[rollout.prompt.uid] = rollout

    def scored(self, sample: AnySample, started_s: float, finished_s: float) -> None:
        """Keep how far a sample has come."""
        self._seen[sample.rollout.prompt.uid] = sample

    def trained(
        self, batch: Batch, figures: UpdateFigures, started_s: float, finished_s: float
    ) -> None:
        """Record samples of a batch. OSError: an earlier row could not be written."""
        for sample in batch.samples:
            self._seen.pop(sample.rollout.prompt.uid, None)
        self._drops = 0
        now_s = time.time()
        for sample in spread(batch.samples, self._per_update):
            self._submit(sample, sample.rollout.prompt.uid, batch.update, now_s, batch.version)

    def updated(self, batch: Batch, depths: Depths) -> None:
        """Keep which update is the first that is not done yet."""
        self._updates = batch.update + 1

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        """Keep which update is the first that is not done yet."""
        self._updates = batch.update + 1

    def dropped(self, uid: int, reason: str, detail: str) -> None:
        """Record a dropped sample. OSError: as trained."""
        seen = self._seen.pop(uid, None)
        if self._drops < self._per_update:
            self._drops += 1
            self._submit(seen, uid, self._updates, time.time(), None, (reason, detail))

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """Write what is left, as no sample comes any more. OSError: as close."""
        self.close()

    def close(self) -> None:
        """Write what is left; safe to call twice. OSError: a row could not be written."""
        for asked in self._asked:
            asked.cancel()  # its row is written without tokens
        self._thread.shutdown()
        self._file.close()
        self._raise_failures()

    def _submit(
        self,
        seen: Seen | None,
        uid: int,
        update: int,
        now_s: float,
        version: int | None,
        drop: tuple[str, str] | None = None,
    ) -> None:
        self._raise_failures()
        arrays: Future[Rollout | Sample] | None = None
        if isinstance(seen, HeldRollout | HeldSample) and self._fetch is not None:
            arrays = self._fetch(seen)
            self._asked.append(arrays)

        def write() -> None:
            found = seen
            if arrays is not None:
                with suppress(SamplesLost, CancelledError):
                    found = arrays.result()
            decoders = (self._decode, self._decode_teacher)
            row = make_row(found, uid, update, now_s, decoders, version, drop)
            self._file.append(msgspec.json.encode(row) + b"\n")

        self._begun.append(self._thread.submit(write))

    def _raise_failures(self) -> None:
        """Look at the rows that are done, in order."""
        while self._begun and self._begun[0].done():
            self._begun.popleft().result()
        while self._asked and self._asked[0].done():
            self._asked.popleft()


def spread(samples: Sequence[AnySample], count: int) -> list[AnySample]:
    """Return at most `count` samples, evenly spaced by uid, the first included."""
    ordered = sorted(samples, key=lambda sample: sample.rollout.prompt.uid)
    count = min(count, len(ordered))
    return [ordered[i * len(ordered) // count] for i in range(count)]


def make_row(
    seen: Seen | None,
    uid: int,
    update: int,
    now_s: float,
    decoders: tuple[Decode, Decode],
    version: int | None,
    drop: tuple[str, str] | None,
) -> RolloutRow:
    """Make the row of a sample; version and drop as in RolloutRow: one of them is None.

    decoders: of the student's ids and of its teacher's.
    """
    decode, decode_teacher = decoders
    sample = seen if isinstance(seen, Sample | HeldSample) else None
    rollout = seen.rollout if isinstance(seen, Sample | HeldSample) else seen
    prompt = rollout.prompt if isinstance(rollout, Rollout | HeldRollout) else rollout
    reason, detail = drop if drop is not None else (None, None)
    own_Q = None if prompt is None else prompt.teacher_ids_Q
    if isinstance(rollout, Rollout) and rollout.teacher_given:
        own_Q = rollout.teacher_given[0]
    row = RolloutRow(
        update=update,
        uid=uid,
        version=version,
        teacher="" if prompt is None else prompt.teacher,
        engine="",
        reward=None if sample is None else sample.reward,
        staleness_versions=None,
        finish_reason=None,
        drop_reason=reason,
        drop_detail=detail,
        unix_time_s=round(now_s, 3),
        spans=[],
        prompt=None if prompt is None else decode(prompt.token_ids_P.tolist()),
        teacher_prompt=None if own_Q is None else decode_teacher(own_Q.tolist()),
        given=[],
        tokens=[],
        sampler_logp=[],
        teacher_logp=None,
        teacher_version=None if sample is None else sample.teacher_version,
    )
    if not isinstance(rollout, Rollout | HeldRollout):
        return row
    row = msgspec.structs.replace(
        row,
        engine=rollout.engine,
        staleness_versions=None if version is None else version - rollout.oldest_version,
        finish_reason=rollout.finish_reason,
        spans=[(span.version, span.start, span.stop) for span in rollout.spans],
    )
    if isinstance(rollout, HeldRollout):
        return row
    path_T = rollout.draws.path_T
    prompt_text, *given = given_texts(decode, rollout)
    return msgspec.structs.replace(
        row,
        prompt=prompt_text[1],
        given=given,
        turns=turn_rows(rollout),
        played_s=_seconds(rollout.finished_s - rollout.started_s) if rollout.turns else None,
        tokens=token_texts(decode, rollout.response_ids_T.tolist()),
        sampler_logp=_rounded(rollout.draws.sampler_logp_N[path_T]),
        teacher_logp=_scores(sample) if isinstance(sample, Sample) else None,
        chunked=isinstance(sample, Sample) and sample.chunked,
    )


def turn_rows(rollout: Rollout) -> list[TurnRow]:
    """Return what is told of each turn, in the order of its tokens; none without environment."""
    found: list[TurnRow] = []
    start = 0
    for run in rollout.runs if rollout.turns else ():
        turn = rollout.turns[run.turn]
        row = TurnRow(
            start=start,
            sequence=run.sequence,
            branch=turn.branch,
            reward=turn.reward,
            sampling_s=_seconds(turn.sampling_s),
            waiting_s=_seconds(turn.waiting_s),
            environment_s=_seconds(turn.environment_s),
            cached=turn.cached,
            answered_by=turn.answered_by,
            calls=[(call.name, call.arguments, call.error) for call in turn.made],
        )
        found.append(row)
        start += run.num_tokens
    return found


def _seconds(measured_s: float) -> float:
    return round(measured_s, 3)


def given_texts(decode: Decode, rollout: Rollout) -> list[tuple[int, str]]:
    """Return what the student was given: before which of its tokens, and the text."""
    found: list[tuple[int, str]] = []
    tokens = stop = 0
    sequence = -1
    for run in rollout.runs:
        start, sequence = (stop if run.sequence == sequence else 0), run.sequence
        found.append((tokens, decode(rollout.sequences[sequence][start : run.start].tolist())))
        tokens, stop = tokens + run.num_tokens, run.stop
    return found


def _scores(sample: Sample) -> list[float | None] | None:
    """Return the scores of the sampled tokens; None where no teacher was asked."""
    if not sample.has_scores:
        return None
    found = _rounded(sample.teacher_logp_N[sample.rollout.draws.path_T])
    if sample.aligned is None:
        return [*found]
    scored = sample.aligned.scored_T.tolist()
    return [each if has else None for each, has in zip(found, scored, strict=True)]


def _rounded(logp_T: FloatArray) -> list[float]:
    rounded_T = np.round(logp_T.astype(np.float64), DIGITS)
    return (rounded_T + 0.0).tolist()  # no -0.0
