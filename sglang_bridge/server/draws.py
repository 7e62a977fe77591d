"""Every sampled token is recorded once: its draws, their exact log-probs, its version.

A record hangs on SGLang's request object, so that it survives retraction: the sampled prefix stays,
its KV is rebuilt, and later tokens are appended under the new version. Only the rank that streams
outputs draws, with a generator of its own, so that SGLang's sampler (and its other ranks) see the
same random numbers with and without us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_bridge import wire
from sglang_bridge.server import compat
from sglang_bridge.server.dedup import dedup
from sglang_bridge.server.sampling import Behaviour, behaviour, draw

RECORD = "_bridge_draws"


def num_draws_of(req: Any) -> int:
    """Draws per token that a request asked for; 0 = none."""
    return int(compat.custom_params(req).get(wire.NUM_DRAWS, 0))


@dataclass(slots=True)
class DrawRecord:
    """Draws of one request so far, as growing raw buffers (9 bytes a distinct id, 2 a token).

    versions: [(version, index of its first token)], run-length coded.
    """

    num_draws: int
    length_T: bytearray = field(default_factory=bytearray)
    path_T: bytearray = field(default_factory=bytearray)
    ids_N: bytearray = field(default_factory=bytearray)
    count_N: bytearray = field(default_factory=bytearray)
    logp_N: bytearray = field(default_factory=bytearray)
    versions: list[tuple[str, int]] = field(default_factory=list)

    def append(self, index: int, row: HostRow, version: str) -> None:
        """Stores output token `index`.

        An index already held restarts from there; a gap is an error.
        """
        if index > len(self.length_T):
            raise RuntimeError(
                f"draws of output token {len(self.length_T)} were lost (got {index})"
            )
        if index < len(self.length_T):
            self._truncate(index)
        self.length_T.append(len(row.ids_R))
        self.path_T.append(row.path)
        self.ids_N += row.ids_R.tobytes()
        self.count_N += row.count_R.tobytes()
        self.logp_N += row.logp_R.tobytes()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, index))

    def _truncate(self, length: int) -> None:
        kept = sum(self.length_T[:length])
        del self.length_T[length:], self.path_T[length:], self.count_N[kept:]
        del self.ids_N[4 * kept :], self.logp_N[4 * kept :]
        self.versions = [(version, start) for version, start in self.versions if start < length]

    def payload(self) -> dict[str, Any]:
        """What the client parses: base64 of every buffer, and the version runs."""
        arrays = {name: wire.pack(getattr(self, name)) for name in wire.DRAW_FIELDS}
        return {**arrays, "num_draws": self.num_draws, "versions": [list(v) for v in self.versions]}


@dataclass(frozen=True, slots=True)
class HostRow:
    """One token's row: ids int32, counts uint8, logp float32, the column of the path token."""

    ids_R: np.ndarray
    count_R: np.ndarray
    logp_R: np.ndarray
    path: int


@dataclass(frozen=True, slots=True)
class HostRows:
    """A step's rows after their copy to the host (SGLang's HostAuxiliaryOutput)."""

    tensors: dict[str, torch.Tensor]
    version: str

    def consume(self, batch: Any, commits: list[Any]) -> None:
        """Appends each newly visible token to its request's record; called before streaming."""
        length_B = self.tensors["length"].numpy()
        arrays = [self.tensors[name].numpy() for name in ("ids", "count", "logp")]
        path_B = self.tensors["path"].numpy()
        for i, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            wanted = num_draws_of(req)
            if commit is None or wanted == 0:
                continue
            ids_R, count_R, logp_R = (array[i, : length_B[i]] for array in arrays)
            row = HostRow(ids_R, count_R, logp_R, int(path_B[i]))
            record = compat.record_of(req, RECORD, lambda m=wanted: DrawRecord(m))
            record.append(commit.output_index, row, self.version)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """A step's rows on the device (SGLang's DeviceAuxiliaryOutput)."""

    tensors: dict[str, torch.Tensor]
    version: str

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> HostRows:
        """Starts the asynchronous copies; `copy` is SGLang's."""
        return HostRows({name: copy(t) for name, t in self.tensors.items()}, self.version)


@dataclass(frozen=True, slots=True)
class Step:
    """The draws wanted from the forward pass being launched: per request, and their maximum."""

    num_draws_B: tuple[int, ...]

    @property
    def columns(self) -> int:
        """M, draws made for every request of the step."""
        return max(self.num_draws_B)


_step: Step | None = None  # of the forward pass being launched; the scheduler runs one at a time


@contextmanager
def sampling_step(step: Step | None) -> Iterator[None]:
    """Makes `step` what the observer sees."""
    global _step
    previous, _step = _step, step
    try:
        yield
    finally:
        _step = previous


def step_of(batch: Any) -> Step | None:
    """The draws a batch asks for, or None when nothing is to be drawn."""
    wanted_B = tuple(num_draws_of(req) for req in batch.reqs)
    return Step(wanted_B) if any(wanted_B) else None


class DrawObserver:
    """SGLang's SamplingObserver: draws before the sampler, records with the token it chose."""

    def __init__(self, device: str, seed: int) -> None:
        self._device = torch.device(device)
        self._generator = torch.Generator(device=self._device)
        self._generator.manual_seed(seed)

    def is_active(self, sampling_info: Any) -> bool:
        """Whether the pass being sampled holds a request with draws."""
        return _step is not None

    def before_grammar(self, logits_BV: torch.Tensor, info: Any) -> tuple[Behaviour, torch.Tensor]:
        """The behaviour distribution and draws from it (the sampler overwrites the logits)."""
        assert _step is not None
        filters = compat.sampling_filters(info)
        policy = behaviour(logits_BV, info.temperatures, **filters)
        shape = (logits_BV.shape[0], _step.columns)
        uniform_BM = torch.rand(
            shape, dtype=torch.float64, device=logits_BV.device, generator=self._generator
        )
        return policy, draw(policy.probs_BV, uniform_BM)

    def after_sample(
        self, state: tuple[Behaviour, torch.Tensor], token_ids: torch.Tensor
    ) -> DeviceRows:
        """Deduplicated rows with the sampled token in them, stamped with the weights' version."""
        assert _step is not None
        policy, ids_BM = state
        num_draws_B = torch.tensor(
            _step.num_draws_B, dtype=torch.int64, pin_memory=ids_BM.is_cuda
        ).to(ids_BM.device, non_blocking=True)
        rows = dedup(ids_BM, num_draws_B, token_ids)
        vocab = policy.logp_BV.shape[1]
        tensors = {
            "ids": rows.ids_BR.to(torch.int32),
            "count": rows.count_BR,
            "logp": policy.gather(rows.ids_BR.clamp(max=vocab - 1)),
            "path": rows.path_B,
            "length": rows.length_B,
        }
        return DeviceRows(tensors, compat.weight_version())
