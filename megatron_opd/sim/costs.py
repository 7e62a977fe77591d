"""Defines what the parts of a simulated run cost: seconds by what they are asked to do. Torch-free.

Invariant: a Costs is valid on its own (every number finite and in range), equals what its JSON
decodes to, makes the clock go on (no step of no time, no work of years), and says nothing about how
many servers there are: that is the configuration's.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from sglang_bridge.errors import one_line

MOST_S = 1e9
"""Most seconds that anything may cost: 30 years. The clock's rounding grows with its time."""
LEAST_STEP_S = 1e-12
"""Fewest seconds of a decode step: the clock cannot tell shorter ones apart."""
LEAST_CORES = 0.01

POSITIVE = frozenset(
    {"max_running", "cache_tokens", "pass_tokens", "ranks", "host_cores", "mean", "prompt_tokens"}
)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checks the ranges of its numbers wherever it is made; from JSON, types are checked too."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in POSITIVE and value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number > 0, got {value}")
            if isinstance(value, float | int) and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number >= 0, got {value}")
            if name.endswith("_s") and value is not None and value > MOST_S:
                raise ValueError(f"{name} must be <= {MOST_S:g} seconds, got {value:g}")


class EngineCost(Record, frozen=True, kw_only=True):
    """Says how long a student server works.

    One decode step of n running requests with k tokens in the KV cache takes
    step_s + n step_request_s + k step_cached_token_s; each of them gets a token. A prefill of n
    requests with k prompt tokens takes prefill_s + n request_s + k prefill_token_s, in which no
    other token is sampled. max_running: requests in a decode step at most; others queue.
    cache_tokens: room of the KV cache over all running requests, prompts included; None: no limit.
    front_cores: what its front end (HTTP, tokens to text) takes of a shared host's cores while it
    works.
    """

    step_s: float
    step_request_s: float = 0.0
    step_cached_token_s: float = 0.0
    prefill_s: float = 0.0
    request_s: float = 0.0
    prefill_token_s: float = 0.0
    max_running: int = 256
    cache_tokens: int | None = None
    front_cores: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest_s = self.step_s + self.step_request_s + self.step_cached_token_s
        if shortest_s < LEAST_STEP_S:
            raise ValueError(
                "step_s + step_request_s + step_cached_token_s must be >= "
                f"{LEAST_STEP_S:g} seconds, got {shortest_s:g}"
            )


class ScoreCost(Record, frozen=True, kw_only=True):
    """Says how long a teacher's server works on a pass.

    A pass of n requests with k tokens (prompts and responses) takes
    pass_s + n request_s + k token_s, at whose end all are scored. It takes all that wait when it
    begins, up to max_running requests and pass_tokens tokens. front_cores: see EngineCost.
    """

    pass_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0
    max_running: int = 256
    pass_tokens: int = 16_384
    front_cores: float = 0.0


class LearnerCost(Record, frozen=True, kw_only=True):
    """Says how long an update takes: update_s, and the time of the busiest data-parallel rank.

    A sample of n tokens (prompt and response) is n token_s + n^2 / 2 token_context_s of its rank's
    time: each token attends to n / 2 others on average. ranks: data-parallel ranks, among which the
    samples are shared out as the learner does it.
    """

    update_s: float = 0.0
    token_s: float
    token_context_s: float = 0.0
    ranks: int = 1


class SyncCost(Record, frozen=True, kw_only=True):
    """Says how long a weight sync takes: sync_s, of which the servers are paused paused_s, its end.

    held_s: for how long no update may begin; None: all of it (weight_sync.overlap makes it less).
    num_bytes: that one server rank receives; written to the metrics, costs nothing.
    """

    sync_s: float
    paused_s: float
    held_s: float | None = None
    num_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("paused_s", "held_s"):
            value = getattr(self, name)
            if value is not None and value > self.sync_s:
                raise ValueError(f"{name} must be <= sync_s = {self.sync_s}, got {value}")


class Costs(Record, frozen=True, kw_only=True):
    """Holds the costs of all parts of a run.

    teachers: by the name that prompts know a teacher by. network_s: one way between the controller
    and a server. controller_s: what the controller works on a response or turn, one by one.
    host_cores: cores that the controller, the learner's data-parallel ranks, servers of every role
    and weight sync share, each of which keeps one busy while it works; None: each has hardware of
    its own.
    """

    engine: EngineCost
    teachers: dict[str, ScoreCost]
    learner: LearnerCost
    sync: SyncCost
    network_s: float = 0.0
    controller_s: float = 0.0
    host_cores: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_cores is not None and self.host_cores < LEAST_CORES:
            raise ValueError(f"host_cores must be >= {LEAST_CORES}, got {self.host_cores:g}")


class LognormalTurns(Record, frozen=True, kw_only=True):
    """Draws the turns of trajectories, and how long their environment answers.

    mean: turns of a trajectory, before the cut at environment.max_turns; cv: standard deviation
    over mean, of a lognormal distribution; 0: all are alike. given_tokens: between two turns.
    answer_s, answer_cv: mean seconds of an answer, the last one too, and their spread.
    """

    mean: float
    cv: float = 0.0
    given_tokens: int = 64
    answer_s: float = 0.0
    answer_cv: float = 0.0


class LognormalLengths(Record, frozen=True, kw_only=True, tag="lognormal"):
    """Draws response lengths from a lognormal distribution, cut off at rollout.max_new_tokens.

    mean: tokens, before the cut, of a turn where there are turns. cv: standard deviation over mean;
    0: all are alike. prompt_tokens: of every prompt. turns: of trajectories; None: of single
    responses.
    """

    mean: float
    cv: float = 0.0
    prompt_tokens: int = 128
    turns: LognormalTurns | None = None


class TurnLength(msgspec.Struct, frozen=True, array_like=True):
    """Says how long a turn of a trajectory is.

    given: tokens before it that the turn before did not have, of the first one the prompt.
    answer_s: seconds in which the environment answers it.
    """

    given: int
    sampled: int
    answer_s: float


class RecordedLengths(Record, frozen=True, kw_only=True, tag="recorded"):
    """Draws lengths from a list of (prompt, response) tokens, each pair as likely as the others.

    trajectories: of a run with an environment, drawn in their place, turns as they were.
    """

    pairs: list[tuple[int, int]]
    trajectories: list[tuple[TurnLength, ...]] = []


Lengths = LognormalLengths | RecordedLengths


def encode_costs(costs: Costs) -> bytes:
    """Encode costs as JSON of several lines."""
    return msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n"


def decode_costs(content: bytes) -> Costs:
    """Decode costs. ValueError: no JSON, an unknown or missing key, a number out of its range."""
    try:
        return msgspec.json.decode(content, type=Costs)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(one_line(str(error))) from None


def read_costs(path: Path) -> Costs:
    """Read a file of costs. ValueError, in one line: it cannot be read, or decode_costs refuses."""
    try:
        return decode_costs(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
