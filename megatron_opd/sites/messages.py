"""Defines the records that travel between a sampler site and the learner's site; msgspec.

A message on the link is one record, and frames behind it where the record says so. A site may hold
links to several learners; every record is about the learner at the other end. Whatever arrives is
read by `decode_to_site` or `decode_to_learner`, which raise BadMessage and nothing else.

    site                                learner
      | Hello(who, what it holds)          |
      |----------------------------------->|  refused: Farewell, one line
      |          Welcome(run, newest)      |
      |<-----------------------------------|
      |          Task(uid, prompt)         |  as many as it has slots
      |<-----------------------------------|
      | Done(uid, ...) + frames, or Gone   |
      |----------------------------------->|  each uid counts once
      |          Offer(version)            |
      |<-----------------------------------|
      | Want(version, file, range)         |
      |----------------------------------->|
      |          Piece + bytes             |
      |<-----------------------------------|
      | Serving(version)                   |
      |----------------------------------->|
      |          Again                     |  the run goes back to a checkpoint:
      |<-----------------------------------|  from Hello on
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from megatron_opd.records.mixtures import Shares
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.types import RightAnswer, TurnFigures
from megatron_opd.wire.codec import ENCODER, Codec

PROTOCOL = 4
"""Both ends must have the same."""
DETAIL_CHARS = 400
"""Most characters of a reason in one line."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Serves as the base of all records."""


class SiteHello(_Message, frozen=True):
    """Introduces a site, after each start of its process or of the learner's, and each Again.

    process: a name that this start of it alone has. slots: prompts that it samples at once. scores:
    whether it has every teacher. digests: config/digests.py's, of what both ends must have alike.
    model, tokenizer: CRC-32 of the student's files. vocab_size: ids that it samples from; ends:
    those that end a response, rising. clock_s: its Unix time. holds: uids of this run that it was
    given before and has not delivered.
    """

    protocol: int
    site: str
    process: str
    slots: int
    scores: bool
    digests: dict[str, str]
    model: int
    tokenizer: int
    vocab_size: int
    ends: list[int]
    clock_s: float
    holds: list[int]


class Serving(_Message, frozen=True):
    """Says that all of the site's servers sample with `version`, whose digest was verified."""

    version: int


class SiteDone(_Message, frozen=True):
    """Brings a finished response: behind it the frames of its sample (transport/samples.py).

    age_s: time from the end of sampling to the sending of this, at Unix time sent_s. duration_s: of
    sampling. shape: of the scores, None where no teacher was asked. own_reward: of its environment;
    None: it gave none. turns: what the environment did; none without one.
    """

    uid: int
    finish_reason: str
    age_s: float
    sent_s: float
    duration_s: float
    engine: str
    restarts: int
    shape: ScoreShape | None
    reward: float | None
    overlong_penalty: float
    masked: bool
    own_reward: float | None = None
    turns: tuple[TurnFigures, ...] = ()


class Gone(_Message, frozen=True):
    """Says that a prompt has no sample: why, in a word that is counted, and in one line."""

    uid: int
    reason: str
    detail: str


class Want(_Message, frozen=True):
    """Asks for bytes [start, stop) of a file of a version's directory."""

    name: str
    file: str
    start: int
    stop: int


class Leaving(_Message, frozen=True):
    """Says that the site ends by its user's wish; what it holds is sampled elsewhere."""


class SiteWelcome(_Message, frozen=True):
    """Answers a Hello: the site is part of the run. wanted: of what it holds, what is still to do.

    run: names this start of the learner's run, and each time that it goes back to a checkpoint.
    updates: that it makes in all.
    """

    run: str
    updates: int
    wanted: list[int]


class Again(_Message, frozen=True):
    """Asks for another Hello: the run goes on from a checkpoint; nothing before it is answered."""


class SiteTask(_Message, frozen=True):
    """Asks for one scored sample of a prompt; the fields are types.Prompt's.

    ids: token_ids_P, teacher_ids: teacher_ids_Q, packed (sglang_bridge/arrays.py). Responses of one
    group have one site. The last three are an environment's; they are left out without one.
    """

    uid: int
    text: str
    ids: bytes
    answer: RightAnswer | None
    teacher: str
    max_new_tokens: int | None
    stop: tuple[str, ...]
    task: str | None
    row_id: str
    row: int
    reward_weight: float
    teacher_weight: float
    teacher_ids: bytes | None = None
    mixture: Shares = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    columns: dict[str, Any] = {}


class Forget(_Message, frozen=True):
    """Tells a site to forget prompts: they were sampled elsewhere, or are not wanted any more."""

    uids: list[int]


class FileSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names a file of a version's directory. digest: BLAKE2b of 32 bytes."""

    name: str
    num_bytes: int
    digest: bytes


class Offer(_Message, frozen=True):
    """Says that a version of the weights can be pulled.

    name: of its directory (sglang_bridge/weights/manifest.py). base: the version that its changes
    apply to, None where it is whole. files: all of its directory, the manifest included.
    """

    version: int
    name: str
    base: str | None
    files: list[FileSize]


class FilePiece(_Message, frozen=True):
    """Brings what a Want asked for, in the frame behind it."""

    name: str
    file: str
    start: int


class MissingPiece(_Message, frozen=True):
    """Says that a version that was asked for was removed; a newer one is offered."""

    name: str


class Farewell(_Message, frozen=True):
    """Ends the site's part. cause: in one line; None: the run has ended as it should."""

    cause: str | None


ToLearner = SiteHello | Serving | SiteDone | Gone | Want | Leaving
ToSite = SiteWelcome | Again | SiteTask | Forget | Offer | FilePiece | MissingPiece | Farewell

encode: Callable[[ToLearner | ToSite], bytes] = ENCODER.encode
"""Encodes a record."""
decode_to_learner = Codec[ToLearner](ToLearner).decode
"""Decodes what a site sent. BadMessage: it is anything else."""
decode_to_site = Codec[ToSite](ToSite).decode
"""Decodes what the learner's site sent. BadMessage: it is anything else."""
