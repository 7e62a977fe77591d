"""Defines the records that cross between the pipeline and SGLang. Frozen, torch-free.

Axes, as name suffixes: T sampled tokens of one request, N flattened (token, cached action) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_bridge.columns import DrawColumns

MAX_DRAWS = 64
MAX_ATOMS = 8192  # whole distributions are for small vocabularies: 12 bytes an id and token

# How large a reply may be. Generous: a sound server's is a fraction of it, and a flood is cut long
# before it fills the memory.
# The envelope: names, finish reason, version spans.
BASE_BYTES = 1 << 20
# A token: its id, its row's length and path, its log-prob (12), and columns to come.
TOKEN_BYTES = 1 << 8
# An id: id, weight, log-prob (12), rounded up.
ID_BYTES = 16
# The experts of an input: 256 layers of 16 two-byte numbers.
EXPERT_BYTES = 8 << 10
# Their weights, of four bytes each.
GATE_BYTES = 16 << 10

IntArray = npt.NDArray[np.int32]
OffsetArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
ExpertArray = npt.NDArray[np.unsignedinteger[Any]]
GateArray = npt.NDArray[np.floating[Any]]

FinishReason = Literal["stop", "stop_string", "length"]
"""An end token was sampled, a string of the request was, or the most tokens were."""


@dataclass(frozen=True, kw_only=True)
class DrawCache(DrawColumns[FloatArray]):
    """Holds what was selected at each response position: atoms, draws, the path token.

    The num_atoms likeliest ids of the owner's distribution (the sampler's behaviour distribution,
    or the teacher's) weigh their probability (fewer where it has fewer); num_draws iid draws from
    the rest, the tail, weigh tail mass / num_draws each, weights of equal ids added. With
    num_draws > 0, sum(weight * f) over a row is an unbiased estimate of E[f] for every f, and a
    row's weights sum to 1; without draws they sum to the atoms' mass. Every row also holds the
    token that continued the path, with weight 0 when nothing selected it, so that its log-probs
    travel with the rest; where nothing but the path is cached its weight is 1.

    offsets_T1: int64 [T + 1], row t is the slice offsets[t]:offsets[t + 1]; never empty. ids_N:
    int32, strictly increasing inside a row. path_T: int64 [T], index into N of the token that
    continued the path. weight_N, sampler_logp_N: see DrawColumns; where the teacher selected the
    ids, sampler_logp_N is NaN except the path's, and never read.
    """

    offsets_T1: OffsetArray
    ids_N: IntArray
    path_T: OffsetArray

    @property
    def num_tokens(self) -> int:
        """Returns the number of response tokens, T."""
        return len(self.offsets_T1) - 1

    @property
    def num_ids(self) -> int:
        """Returns the number of cached (token, id) pairs, N."""
        return len(self.ids_N)


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for one completion.

    rid: unique. num_atoms (0..MAX_ATOMS), num_draws (0..MAX_DRAWS): what to cache at each position,
    see DrawCache; thin: at most that many, fewer where p is peaked (both must be asked for).
    record: keep a cache, implied by either; alone it holds the path token only. Without a cache:
    plain generation (evaluation). experts: also tell which experts each input visited; needs a
    cache and a server that keeps them (ServerSpec.routed_experts). gates: and with what weights
    (ServerSpec.routed_gates). temperature: 0 = greedy. stop_token_ids: end the response besides the
    model's own end-of-sequence ids. stop: strings that end it, as soon as its text holds one. seed:
    of the path on every server, and on deterministic ones of all that is random; its numbers belong
    to positions counted from the first of input_ids, so that a later turn of the same seed has
    others. Without one the server samples by its own generator (a deterministic server: by one seed
    for all). exact: the log-probs of all cached ids travel as float32, and not only those of the
    path (arrays.py).
    """

    rid: str
    input_ids: Sequence[int] | IntArray
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    num_atoms: int = 0
    num_draws: int = 0
    thin: bool = False
    record: bool = False
    experts: bool = False
    gates: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        check_support(self.num_atoms, self.num_draws, self.thin)
        if not all(self.stop):
            raise ValueError(f"stop must hold no empty string, got {self.stop}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if len(self.input_ids) == 0:
            raise ValueError("input_ids must hold at least one token")
        if self.experts and not self.keeps_cache:
            raise ValueError("experts needs record, atoms or draws, got none of them")
        if self.gates and not self.experts:
            raise ValueError("gates needs experts, got experts=False")

    @property
    def keeps_cache(self) -> bool:
        """Returns whether the reply has to hold a DrawCache."""
        return self.record or self.selects

    @property
    def selects(self) -> bool:
        """Returns whether the cache holds more than the path."""
        return self.num_atoms > 0 or self.num_draws > 0

    @property
    def reply_bytes(self) -> int:
        """Returns the largest size of a reply: no more of it is read."""
        row = self.num_atoms + self.num_draws + 1
        size = BASE_BYTES + self.max_new_tokens * (TOKEN_BYTES + row * ID_BYTES)
        inputs = len(self.input_ids) + self.max_new_tokens
        return size + inputs * (EXPERT_BYTES * self.experts + GATE_BYTES * self.gates)


@dataclass(frozen=True, slots=True)
class RolloutReply:
    """Holds one completion. output_ids_T: int32 [T], all that was sampled.

    Its end-of-sequence token is included, and the tokens of a stop string, of which the last may
    spell more than the string. spans: (version, start, stop), covering [0, T). draws: None when the
    request asked for none. url: the server that sampled it. experts_XLk: uint8 or uint16 [P + T -
    1, layers with experts, experts a token], where each input went when it was last computed; None
    unless asked for. gates_XLk: float32, the weights that these experts' outputs were multiplied
    with, in the same order; None unless asked for. cached_tokens: of input_ids, those whose keys
    and values the server had from earlier requests when it took this one up.
    """

    output_ids_T: IntArray
    finish_reason: FinishReason
    draws: DrawCache | None
    spans: tuple[tuple[int, int, int], ...]
    url: str = ""
    experts_XLk: ExpertArray | None = None
    gates_XLk: GateArray | None = None
    cached_tokens: int = 0


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks to score ids in the place of each sampled token of a sequence, in one forward pass.

    input_ids: the whole sequence. runs: (start, stop) among them of what was sampled, at least one;
    T sampled tokens in all, the others are given (prompt, tool results). The first id is given, the
    last one sampled: what came after it would be computed for nothing. Row t (of ids_N,
    offsets_T1[t]:offsets_T1[t + 1]) is scored under q_t = softmax(logits / temperature) at the
    position before sampled token t, which predicts it. num_atoms, num_draws: ids to select from q_t
    besides, in every row, by DrawCache's rule. seed: of those draws, read by deterministic servers
    alone. exact: scores travel as float32.
    """

    rid: str
    input_ids: Sequence[int] | IntArray
    runs: tuple[tuple[int, int], ...]
    offsets_T1: OffsetArray
    ids_N: IntArray
    temperature: float = 1.0
    num_atoms: int = 0
    num_draws: int = 0
    seed: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        check_runs(self.runs, len(self.input_ids))
        tokens = sum(stop - start for start, stop in self.runs)
        if len(self.offsets_T1) != tokens + 1:
            raise ValueError(
                f"offsets_T1 must hold an offset more than the runs have ids, T={tokens}, "
                f"got {len(self.offsets_T1)}"
            )
        if self.offsets_T1[0] != 0 or self.offsets_T1[-1] != len(self.ids_N):
            raise ValueError(
                f"offsets_T1 must run from 0 to N={len(self.ids_N)}, "
                f"got {self.offsets_T1[0]}..{self.offsets_T1[-1]}"
            )
        check_temperature(self.temperature)
        check_support(self.num_atoms, self.num_draws)

    @property
    def num_tokens(self) -> int:
        """Returns the number of sampled tokens, T."""
        return len(self.offsets_T1) - 1

    @property
    def position_T(self) -> OffsetArray:
        """Returns int64 [T]: the positions in input_ids whose logits the rows are scored with."""
        return row_positions(self.runs)

    @property
    def selects(self) -> bool:
        """Returns whether the reply has to hold a Selection."""
        return self.num_atoms > 0 or self.num_draws > 0

    @property
    def reply_bytes(self) -> int:
        """Returns the largest size of a reply: no more of it is read."""
        row = self.num_atoms + self.num_draws
        rows = self.num_tokens * (TOKEN_BYTES + row * ID_BYTES)
        return BASE_BYTES + rows + len(self.ids_N) * ID_BYTES


@dataclass(frozen=True, slots=True)
class Selection:
    """Holds for each row of a request the union of its ids and those selected from q.

    offsets_T1: int64 [T + 1]. ids_N: int32, strictly increasing inside a row. weight_N: float32,
    > 0 for every selected id (q(id) for an atom, tail mass * hits / num_draws for a draw), 0 for an
    id of the request alone. logp_N: float32, log q(id | prefix), finite. given_N: int64, over the
    request's N: index into this ids_N of each id of the request, in its order.
    """

    offsets_T1: OffsetArray
    ids_N: IntArray
    weight_N: FloatArray
    logp_N: FloatArray
    given_N: OffsetArray


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """Holds scores. logp_N: float32 [N], log q(id | prefix) of the request's ids_N; finite.

    selection: None when the request selected nothing.
    """

    logp_N: FloatArray
    selection: Selection | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Tells how far a server is with its requests, by their names.

    tokens: sampled so far for each that it runs. waiting: those in its queue, also again.
    """

    tokens: Mapping[str, int]
    waiting: frozenset[str]


class ServerEnds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the ids at which a server ends every request, whatever that asks for.

    model: by config.json and generation_config.json. tokenizer: by its tokenizer; None: it has
    none.
    """

    model: tuple[int, ...] = ()
    tokenizer: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Describes a server by its own words.

    version: of its weights. context_length: in tokens. deterministic, quantization: see ServerSpec.
    ends: where it ends requests.
    """

    url: str
    model_path: str
    vocab_size: int
    context_length: int
    tp_size: int
    ep_size: int
    version: int
    dtype: str
    max_total_tokens: int
    deterministic: bool
    quantization: str | None = None
    ends: ServerEnds = field(default_factory=ServerEnds)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Describes one flattened bucket of a weight sync: names (Hugging Face), dtypes, shapes.

    The bytes on the wire are the tensors' raw bytes, end to end, without padding.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes) > 0:
            raise ValueError(
                "a bucket needs as many names as dtypes and shapes, at least one: got "
                f"{len(self.names)}, {len(self.dtypes)}, {len(self.shapes)}"
            )


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Describes a slice of one Hugging Face tensor as a rank of a server holds it now.

    The slice is rows [start, start + length) of dimension `dim`; a router or norm is one piece of
    dimension 0. dtype: torch's name, "float32". digest: see sglang_bridge/weights/digest.py; empty
    where it was not asked for.
    """

    rank: int
    hf_name: str
    dim: int
    start: int
    length: int
    dtype: str
    digest: str


def row_positions(runs: Sequence[tuple[int, int]]) -> OffsetArray:
    """Returns int64 [T]: the position before each id of the runs, which predicts it."""
    return np.concatenate([np.arange(start - 1, stop - 1) for start, stop in runs])


def check_runs(runs: Sequence[tuple[int, int]], num_ids: int) -> None:
    """Raises ValueError for what cannot be the sampled runs of a sequence of num_ids ids."""
    if not runs:
        raise ValueError("runs must hold at least one run of sampled ids, got none")
    for start, stop in runs:
        if not 1 <= start < stop:
            raise ValueError(f"a run must have 1 <= start < stop, got {start}..{stop}")
    for (_, stop), (start, _) in pairwise(runs):
        if start < stop:
            raise ValueError(f"runs must rise and not overlap, got {start} after stop={stop}")
    if runs[-1][1] != num_ids:
        raise ValueError(
            f"the last run must end with the last of {num_ids} input_ids, got stop={runs[-1][1]}"
        )


def check_support(num_atoms: int, num_draws: int, thin: bool = False) -> None:
    """Raises ValueError outside 0..MAX_ATOMS atoms and 0..MAX_DRAWS draws; thin needs both."""
    if not 0 <= num_atoms <= MAX_ATOMS:
        raise ValueError(f"num_atoms must be in 0..{MAX_ATOMS}, got {num_atoms}")
    if not 0 <= num_draws <= MAX_DRAWS:
        raise ValueError(f"num_draws must be in 0..{MAX_DRAWS}, got {num_draws}")
    if thin and not (num_atoms and num_draws):
        raise ValueError(f"thin needs atoms and draws, got {num_atoms} and {num_draws}")


def check_temperature(temperature: float) -> None:
    """Raises ValueError unless 0 < temperature < inf."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be > 0 and finite, got {temperature}")
