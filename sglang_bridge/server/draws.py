"""Records every sampled token once: atoms and draws, their exact log-probs, its version.

A record hangs on SGLang's request object, so that it survives retraction: the sampled prefix stays,
its KV is rebuilt, and later tokens are appended under the new version. Only the rank that streams
outputs draws, with a generator of its own (a deterministic server: with the request's numbers), so
that SGLang's sampler (and its other ranks) see the same random numbers with and without us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_bridge import wire
from sglang_bridge.arrays import pack, pack_logp, pack_weights
from sglang_bridge.columns import axis_of
from sglang_bridge.server import seeded
from sglang_bridge.server.compat import batches, ranks
from sglang_bridge.server.rows import build_rows, forced
from sglang_bridge.server.sampling import Behaviour, behaviour
from sglang_bridge.server.selection import Selected, Wanted, select
from sglang_bridge.server.transfer import to_device

RECORD = "_bridge_draws"
LEAST_PROBABILITY = torch.finfo(torch.float32).tiny  # of a token that was sampled
_DTYPES = {name: np.dtype(dtype) for name, dtype in wire.DRAW_FIELDS.items()}
_RAGGED = {name: axis_of(name) == "N" for name in wire.DRAW_FIELDS}


def support_of(req: Any) -> tuple[int, int] | None:
    """Returns (atoms, draws) per token that a request asked for; None when it keeps no record."""
    params = batches.custom_params(req)
    if wire.NUM_DRAWS not in params:
        return None
    return int(params.get(wire.NUM_ATOMS, 0)), int(params[wire.NUM_DRAWS])


@dataclass(slots=True)
class DrawRecord:
    """Holds the rows of one request so far, as growing raw buffers (12 bytes an id, 4 a token).

    columns: by name, the arrays of wire.DRAW_FIELDS. versions: [(version, index of its first
    token)], run-length coded. exact: log-probs leave as float32.
    """

    num_atoms: int
    num_draws: int
    exact: bool = False
    columns: dict[str, bytearray] = field(
        default_factory=lambda: {name: bytearray() for name in wire.DRAW_FIELDS}
    )
    versions: list[tuple[str, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Returns the number of output tokens held."""
        return len(self.columns["length_T"]) // _DTYPES["length_T"].itemsize

    def append(self, index: int, row: Mapping[str, np.ndarray], version: str) -> None:
        """Stores output token `index`; row: its part of every column, in the column's type.

        An index already held restarts from there; a gap is an error.
        """
        held = self.num_tokens
        if index > held:
            raise RuntimeError(f"draws of output token {held} were lost (got {index})")
        if index < held:
            self._truncate(index)
        for name, column in self.columns.items():
            column += row[name].tobytes()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, index))

    def _truncate(self, length: int) -> None:
        lengths_T = np.frombuffer(bytes(self.columns["length_T"]), _DTYPES["length_T"])
        kept = {"T": length, "N": int(lengths_T[:length].sum())}
        for name, column in self.columns.items():
            del column[kept[axis_of(name)] * _DTYPES[name].itemsize :]
        self.versions = [(version, start) for version, start in self.versions if start < length]

    def payload(self) -> dict[str, Any]:
        """Returns what the client parses: every column packed, and the version runs."""
        arrays = {name: np.frombuffer(raw, _DTYPES[name]) for name, raw in self.columns.items()}
        packed = {
            name: pack(column)
            for name, column in arrays.items()
            if name not in ("weight_N", "sampler_logp_N")
        }
        draws = 0 if self.num_atoms else self.num_draws
        logp_N = arrays["sampler_logp_N"]
        if (self.num_atoms or self.num_draws) and not self.exact:
            length_T = arrays["length_T"].astype(np.int64)
            path_N = np.cumsum(length_T) - length_T + arrays["path_T"]
            packed[wire.PATH_LOGP] = pack(logp_N[path_N])
            packed["sampler_logp_N"] = pack_logp(logp_N)
        else:
            packed["sampler_logp_N"] = pack(logp_N)
        return {
            **packed,
            "weight_N": pack_weights(arrays["weight_N"], draws),
            "num_atoms": self.num_atoms,
            "num_draws": self.num_draws,
            "versions": [list(run) for run in self.versions],
        }


@dataclass(frozen=True, slots=True)
class HostRows:
    """Holds a step's rows after their copy to the host (SGLang's HostAuxiliaryOutput).

    tensors: by the names of wire.DRAW_FIELDS; an N is [B, R], of which a row uses length_T, a T is
    [B].
    """

    tensors: dict[str, torch.Tensor]
    version: str

    def consume(self, batch: Any, commits: list[Any]) -> None:
        """Appends each newly visible token to its request's record; called before streaming."""
        arrays = {
            name: self.tensors[name].numpy().astype(dtype, copy=False)
            for name, dtype in _DTYPES.items()
        }
        length_B = arrays["length_T"].tolist()
        for i, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            support = support_of(req)
            if commit is None or support is None:
                continue
            row = {
                name: values[i, : length_B[i]] if _RAGGED[name] else values[i : i + 1]
                for name, values in arrays.items()
            }
            exact = bool(batches.custom_params(req).get(wire.EXACT))
            record = batches.record_of(
                req, RECORD, lambda s=support, e=exact: DrawRecord(*s, exact=e)
            )
            record.append(commit.output_index, row, self.version)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Holds a step's rows on the device (SGLang's DeviceAuxiliaryOutput)."""

    tensors: dict[str, torch.Tensor]
    version: str

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> HostRows:
        """Starts the asynchronous copies; `copy` is SGLang's."""
        return HostRows({name: copy(t) for name, t in self.tensors.items()}, self.version)


@dataclass(frozen=True, slots=True)
class Step:
    """Says what the requests of a forward pass want at the tokens it predicts.

    uniform_BM: float64, the numbers that choose the draws; None: the server's generator gives them.
    """

    wanted: Wanted
    uniform_BM: np.ndarray | None = None


_step: Step | None = None  # for the forward pass being launched; one runs at a time
_sampled_BV: torch.Tensor | None = None  # the probabilities that its sampler samples from


@contextmanager
def sampling_step(step: Step | None) -> Iterator[None]:
    """Makes `step` what the observer sees."""
    global _step, _sampled_BV
    previous, _step = _step, step
    try:
        yield
    finally:
        _step, _sampled_BV = previous, None


def show_probabilities(probs_BV: torch.Tensor) -> None:
    """Shows what the sampler is about to sample from, before any truncation.

    A step without truncation has a token's log-prob from here: its logits are overwritten by these
    probabilities, and a copy of them would be another pass over [B, V].
    """
    global _sampled_BV
    if _step is not None:
        _sampled_BV = probs_BV


def step_of(batch: Any) -> Step | None:
    """Returns what a batch asks for at its next token, or None when nothing is to be recorded."""
    supports = [support_of(req) for req in batch.reqs]
    if not any(support is not None for support in supports):
        return None
    atoms_B, draws_B = np.array([s or (0, 0) for s in supports], dtype=np.int64).T
    thin_B = np.array([bool(batches.custom_params(req).get(wire.THIN)) for req in batch.reqs])
    wanted = Wanted(atoms_B, draws_B, thin_B)
    if not ranks.is_deterministic():
        return Step(wanted)
    seed_B = [batches.seed_of(req) for req in batch.reqs]
    position_B = batches.next_positions(batch)
    return Step(wanted, seeded.step_uniforms(seed_B, seeded.DRAWS, position_B, draws_B.tolist()))


class DrawObserver:
    """Observes SGLang's sampling: draws before the sampler, records with the token it chose."""

    def __init__(self, device: str, seed: int) -> None:
        self._device = torch.device(device)
        self._generator = torch.Generator(device=self._device)
        self._generator.manual_seed(seed)

    def is_active(self, sampling_info: Any) -> bool:
        """Returns whether the pass being sampled holds a request with a record."""
        return _step is not None

    def before_grammar(self, logits_BV: torch.Tensor, info: Any) -> tuple[Behaviour, Selected]:
        """Returns the behaviour distribution and a selection, before the sampler runs."""
        assert _step is not None
        policy = behaviour(logits_BV, info.temperatures, **batches.sampling_filters(info))
        if _step.uniform_BM is None:
            shape = (logits_BV.shape[0], _step.wanted.max_draws)
            uniform_BM = torch.rand(
                shape, dtype=torch.float64, device=logits_BV.device, generator=self._generator
            )
        else:
            uniform_BM = to_device(_step.uniform_BM, logits_BV.device)
        return policy, select(policy, _step.wanted, uniform_BM)

    def after_sample(
        self, state: tuple[Behaviour, Selected], token_ids: torch.Tensor
    ) -> DeviceRows:
        """Returns rows with the sampled token in them, stamped with the weights' version."""
        policy, selected = state
        path_B = token_ids.to(torch.int64)
        path_B1 = path_B[:, None]
        rows = build_rows(selected, forced(path_B1, _path_logp(policy, path_B1)))
        tensors = {
            "length_T": rows.length_B.to(torch.int32),
            "path_T": rows.column_of(path_B).to(torch.int32),
            "ids_N": rows.ids_BR.to(torch.int32),
            "weight_N": rows.weight_BR,
            "sampler_logp_N": rows.logp_BR,
        }
        return DeviceRows(tensors, ranks.weight_version())


def _path_logp(policy: Behaviour, path_B1: torch.Tensor) -> torch.Tensor:
    """Returns float32 [B, 1]: the log-probs of the tokens that the sampler chose."""
    if policy.is_cut:
        return policy.logits_BV.gather(1, path_B1)
    if _sampled_BV is None:
        raise RuntimeError("SGLang sampled in a way that does not show its probabilities")
    return _sampled_BV.gather(1, path_B1).float().clamp(min=LEAST_PROBABILITY).log()
