"""The records that cross between the pipeline and SGLang. Frozen, torch-free.

Axes, as name suffixes: T response tokens of one request, N flattened (token, cached action) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

MAX_DRAWS = 64

IntArray = npt.NDArray[np.int32]
OffsetArray = npt.NDArray[np.int64]
CountArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class DrawCache:
    """What the server drew at each response position, deduplicated.

    offsets_T1: int64 [T + 1], row t is the slice offsets[t]:offsets[t + 1]. ids_N: int32, strictly
    increasing inside a row; the path token is always there. count_N: uint8, how many of the
    num_draws iid draws hit the id; 0 = the path token, hit by none. A row sums to num_draws.
    logp_N: float32, log of the behaviour distribution (after temperature, top-k, top-p, min-p).
    path_T: int64 [T], index into N of the token that continued the path.
    """

    offsets_T1: OffsetArray
    ids_N: IntArray
    count_N: CountArray
    logp_N: FloatArray
    path_T: OffsetArray
    num_draws: int

    @property
    def num_tokens(self) -> int:
        """T, response tokens."""
        return len(self.offsets_T1) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One completion to sample.

    rid: unique. num_draws: 0 = plain generation (evaluation), else 1..MAX_DRAWS. temperature: 0 =
    greedy. stop_token_ids: end the response besides the model's own end-of-sequence ids.
    """

    rid: str
    input_ids: Sequence[int] | IntArray
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    num_draws: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.num_draws <= MAX_DRAWS:
            raise ValueError(f"num_draws must be in 0..{MAX_DRAWS}, got {self.num_draws}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if len(self.input_ids) == 0:
            raise ValueError("input_ids must hold at least one token")


@dataclass(frozen=True, slots=True)
class RolloutReply:
    """output_ids_T: int32 [T], a sampled end-of-sequence token included.

    spans: (version, start, stop), covering [0, T). draws: None when the request asked for none.
    url: the server that sampled it.
    """

    output_ids_T: IntArray
    finish_reason: FinishReason
    draws: DrawCache | None
    spans: tuple[tuple[int, int, int], ...]
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Ids to score after each prefix of a response. input_ids: prompt + response, P + T tokens.

    Row t (offsets_T1[t]:offsets_T1[t + 1] of ids_N) is scored under the distribution at absolute
    position P - 1 + t, the one that predicts response token t.
    """

    rid: str
    input_ids: Sequence[int] | IntArray
    num_prompt_tokens: int
    offsets_T1: OffsetArray
    ids_N: IntArray

    def __post_init__(self) -> None:
        tokens = len(self.offsets_T1) - 1
        if self.num_prompt_tokens < 1 or len(self.input_ids) != self.num_prompt_tokens + tokens:
            raise ValueError(
                f"input_ids must hold num_prompt_tokens + T tokens, got {len(self.input_ids)} for "
                f"num_prompt_tokens={self.num_prompt_tokens}, T={tokens}"
            )
        if self.offsets_T1[0] != 0 or self.offsets_T1[-1] != len(self.ids_N):
            raise ValueError(
                f"offsets_T1 must run from 0 to N={len(self.ids_N)}, "
                f"got {self.offsets_T1[0]}..{self.offsets_T1[-1]}"
            )

    @property
    def num_tokens(self) -> int:
        """T, response tokens."""
        return len(self.offsets_T1) - 1


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """logp_N: float32 [N], log q(id | prefix) at temperature 1, in the order of ids_N; finite."""

    logp_N: FloatArray


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself. version: of its weights; context_length: in tokens."""

    url: str
    model_path: str
    vocab_size: int
    context_length: int
    tp_size: int
    ep_size: int
    version: int
    dtype: str
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One flattened bucket of a publication: names (Hugging Face), torch dtype names, shapes.

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
    """A slice of one Hugging Face tensor as a tensor-parallel rank of a server holds it now.

    The slice is rows [start, start + length) of dimension `dim`; a router or norm is one piece of
    dimension 0. dtype: torch's name, "float32". digest: `sglang_bridge.digest.digest` of the
    slice's bytes in row-major order.
    """

    rank: int
    hf_name: str
    dim: int
    start: int
    length: int
    dtype: str
    digest: str
