"""Checks whether a controller can have been in a given state. Torch-free.

A checkpoint is protected by checksums alone, and whoever can write a checkpoint can write those
too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_opd.buffer.pass_rates import CurriculumState
from megatron_opd.buffer.spread import SpreadState
from megatron_opd.controller.snapshot import ControllerState, GroupMember
from megatron_opd.records.mixtures import shares_fault
from megatron_opd.records.runs import runs_fault
from megatron_opd.records.turns import SampledTurn
from megatron_opd.records.types import NO_ROW, ExpertArray, GateArray, Rollout
from sglang_bridge.columns import arrays_of, axis_of
from sglang_bridge.protocol import DrawCache


def state_fault(state: ControllerState) -> str | None:
    """Return what is impossible in a state, or None: see ControllerState and its records."""
    counts = (state.updates, state.version, state.admitted, state.consumed, state.next_uid)
    if min(*counts, state.dropped_in_a_row, *state.dropped.values()) < 0:
        return "a count is below 0"
    placed = state.consumed + sum(state.dropped.values()) + len(state.line)
    if state.admitted != placed:
        return f"{state.admitted} prompts were admitted, {placed} are accounted for"
    for number, member in enumerate(state.line):
        fault = member_fault(member)
        if fault is not None:
            return f"place {number} of the line: {fault}"
    uids = [member.uid for member in state.line]
    if min(uids, default=0) < 0 or any(a >= b for a, b in pairwise([*uids, state.next_uid])):
        return "the line is not in order of admission"
    if any(min(own, default=0) < 0 or sorted(own) != own for own in state.passed):
        return "the rows passed over are not in order"
    return _spread_fault(state.spread) or _curriculum_fault(state.curriculum, state.line)


def _spread_fault(spread: SpreadState | None) -> str | None:
    if spread is None:
        return None
    if min(spread.next_group, spread.in_a_row) < 0:
        return "a count of spread is below 0"
    if min(spread.found, default=spread.next_group) < spread.next_group:
        return "spread holds a group that is decided"
    return None


def _curriculum_fault(curriculum: CurriculumState | None, line: list[GroupMember]) -> str | None:
    if curriculum is None:
        return None
    highest = max((member.asked.row for member in line), default=-1)
    rate_R, seen_R, rows = curriculum.rate_R, curriculum.seen_R, len(curriculum.rate_R)
    if min(curriculum.looked_at, curriculum.skipped, int(seen_R.min(initial=0))) < 0:
        return "a count of the curriculum is below 0"
    if len(seen_R) != rows or not bool(((rate_R >= 0) & (rate_R <= 1)).all()):
        return "the curriculum's pass rates are not one in [0, 1] for each problem"
    if highest >= rows:
        return f"a prompt is of problem {highest}, the curriculum knows {rows}"
    if not all(0 <= row < rows and 0 <= reward <= 1 for _, row, reward in curriculum.noted):
        return "the curriculum noted a reward that cannot be"
    return None


def member_fault(member: GroupMember) -> str | None:
    """Return what is impossible in one place of the line, or None."""
    if sum(part is not None for part in (member.prompt, member.rollout, member.sample)) != 1:
        return "it must hold one of prompt, rollout and sample"
    for number, turn in enumerate(member.turns, 1):
        fault = _turn_fault(turn) if member.prompt is not None else "of what is no prompt"
        if fault is not None:
            return f"turn {number}: {fault}"
    sample, prompt = member.sample, member.asked
    weights = (prompt.reward_weight, prompt.teacher_weight)
    if prompt.row < NO_ROW or not all(0 <= weight < math.inf for weight in weights):
        return "its prompt's row or weights cannot be"
    fault = shares_fault(prompt.mixture)
    if fault is not None:
        return fault
    rollout = member.rollout if sample is None else sample.rollout
    if rollout is None:
        return None
    if sample is not None and not -math.inf < sample.overlong_penalty <= 0:
        return f"a penalty for length of {sample.overlong_penalty}"
    if sample is not None and len(sample.teacher_logp_N) != rollout.draws.num_ids:
        return f"{len(sample.teacher_logp_N)} scores for {rollout.draws.num_ids} ids"
    aligned, tokens = None if sample is None else sample.aligned, rollout.draws.num_tokens
    if aligned is not None and (len(aligned.scored_T) != tokens or not len(aligned.own_R)):
        return f"{len(aligned.scored_T)} marks of scores for {tokens} tokens"
    return _rollout_fault(rollout)


def _rollout_fault(rollout: Rollout) -> str | None:
    fault = runs_fault([len(ids_S) for ids_S in rollout.sequences], rollout.runs)
    if fault is not None:
        return fault
    spans = [(span.version, span.start, span.stop) for span in rollout.spans]
    return (
        _draws_fault(rollout.draws, rollout.num_response_tokens)
        or _spans_fault(spans, rollout.num_response_tokens)
        or _routing_fault(
            rollout.num_tokens - len(rollout.sequences), rollout.experts_XLk, rollout.gates_XLk
        )
    )


def _turn_fault(turn: SampledTurn) -> str | None:
    reply, tokens = turn.reply, len(turn.reply.output_ids_T)
    if reply.draws is None or turn.start < 1 or min(turn.restarts, reply.cached_tokens) < 0:
        return "it has no draws, nothing before it, or a count below 0"
    if not 0 <= turn.sampling_s < math.inf:
        return f"it was sampled in {turn.sampling_s} s"
    fault = _draws_fault(reply.draws, tokens) or _spans_fault(reply.spans, tokens)
    if fault is None and not np.array_equal(
        reply.draws.ids_N[reply.draws.path_T], reply.output_ids_T
    ):
        fault = "its cache is of other tokens"
    return fault or _routing_fault(turn.start + tokens - 1, reply.experts_XLk, reply.gates_XLk)


def _draws_fault(draws: DrawCache, tokens: int) -> str | None:
    arrays = arrays_of(draws, DrawCache)
    lengths = {len(column) for name, column in arrays.items() if axis_of(name) == "N"}
    tokens_T = {len(column) for name, column in arrays.items() if axis_of(name) == "T"}
    if tokens < 1 or draws.num_tokens != tokens or tokens_T != {tokens}:
        return f"its cache does not cover its {tokens} sampled tokens"
    starts_T, stops_T = draws.offsets_T1[:-1], draws.offsets_T1[1:]
    if starts_T[0] != 0 or bool((starts_T >= stops_T).any()) or lengths != {int(stops_T[-1])}:
        return "its rows do not match its cache"
    if bool(np.logical_or(draws.path_T < starts_T, draws.path_T >= stops_T).any()):
        return "a path token is not in its row"
    return None


def _spans_fault(spans: Sequence[tuple[int, int, int]], tokens: int) -> str | None:
    edges = [0, *(stop for _, _, stop in spans)]
    covers = [(start, stop) for _, start, stop in spans] == list(pairwise(edges))
    rising = all(a < b for a, b in pairwise(edges)) and edges[-1] == tokens
    if not (covers and rising and all(version >= 0 for version, *_ in spans)):
        return "its version spans do not cover its sampled tokens"
    return None


def _routing_fault(inputs: int, experts: ExpertArray | None, gates: GateArray | None) -> str | None:
    if experts is not None and len(experts) != inputs:
        return f"it has {inputs} inputs and routed experts for {len(experts)}"
    if gates is None:
        return None
    if experts is None or gates.shape != experts.shape or gates.dtype != np.float32:
        return "its gate weights are not those of its routed experts"
    return None
