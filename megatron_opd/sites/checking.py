"""Turns what a site sends into a sample, or says in one line why no site would send it.

A site has a key of the run and may still be faulty. Nothing of it reaches the learner that no
sample can hold: tokens of another prompt, ids beyond the vocabulary, log-probs above 0,
probabilities that add up to more than 1, versions that the site never had.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from megatron_opd.batching.rank_batch import check_sample
from megatron_opd.buffer.rejection import SampleRejected
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.mixture_rules import most_draws
from megatron_opd.config.schema import Config
from megatron_opd.config.selection import OverlongConfig
from megatron_opd.data_workers.checks import shape_fault
from megatron_opd.environments.trajectory import TrajectoryLimits, trajectory_limits
from megatron_opd.models.spec import ModelSpec
from megatron_opd.records.sample_figures import ScoreParts
from megatron_opd.records.turn_faults import MOST_S, turns_fault
from megatron_opd.records.types import FloatArray, OffsetArray, Prompt, Sample
from megatron_opd.rollout.overlong import judged_length
from megatron_opd.sites.messages import SiteDone
from megatron_opd.transport.samples import FRAMES, Frames, decode_sample
from sglang_bridge.arrays import LOGP_SLACK
from sglang_bridge.errors import one_line
from sglang_bridge.parse import NOTHING_KNOWN, length_fault
from sglang_bridge.tables import MASS_SLACK

FINISH_REASONS = ("stop", "stop_string", "length")


class Forged(ValueError):
    """Reports in one line what no sample can hold."""


@dataclass(frozen=True, slots=True)
class SampleRules:
    """Says what a sample of this run can hold.

    vocab_size: of the student. max_new_tokens: of prompts without their own. overlong: what the
    length of a response does to it. routes: (layers, experts a token, experts) of routing that
    comes along; None: none does. plays: limits of a trajectory; None: samples are completions.
    most_draws: of a token.
    """

    estimator: Estimator
    vocab_size: int
    max_new_tokens: int
    overlong: OverlongConfig
    routes: tuple[int, int, int] | None = None
    plays: TrajectoryLimits | None = None
    most_draws: int = 64

    @classmethod
    def of(cls, config: Config, spec: ModelSpec, vocab_size: int) -> Self:
        """Return those of a run. spec, vocab_size: of the student."""
        routes = (sum(spec.moe_layers), spec.experts_per_token, spec.num_experts)
        return cls(
            estimator=config.estimator,
            vocab_size=vocab_size,
            max_new_tokens=config.rollout.max_new_tokens,
            overlong=config.selection.overlong,
            routes=routes if config.learner.replays_experts else None,
            plays=None
            if config.environment is None
            else trajectory_limits(config.environment, config.rollout.max_new_tokens),
            most_draws=most_draws(config),
        )

    def limit(self, prompt: Prompt) -> int:
        """Return the most tokens of a response, or of a trajectory's turns together."""
        if self.plays is not None:
            return self.plays.most_sampled
        return prompt.max_new_tokens or self.max_new_tokens

    @property
    def widest(self) -> int:
        """Returns the largest number of cached ids of a token, the path's included."""
        support = self.estimator.support
        return 1 + support.num_atoms(self.vocab_size) + self.most_draws


def received_sample(
    rules: SampleRules,
    prompt: Prompt,
    done: SiteDone,
    frames: Frames,
    *,
    may_have: Callable[[int], bool],
    scores: bool,
    site: str,
    delay_s: float,
) -> Sample:
    """Return the sample that a site sent for `prompt`. Forged: it can be none.

    may_have: whether the site can have sampled with a version. scores: whether it asks the
    teachers. delay_s: since the end of sampling.
    """
    most = FRAMES * (1 if rules.plays is None else rules.plays.max_sequences)
    if not FRAMES <= len(frames) <= most:
        raise Forged(f"{len(frames)} frames of a sample, which has {FRAMES} to {most}")
    try:
        sample = decode_sample(prompt.uid, frames)
        check_sample(sample)
    except ValueError as error:
        raise Forged(one_line(str(error))) from None
    finished_s = asyncio.get_running_loop().time() - delay_s
    rollout = replace(
        sample.rollout,
        prompt=prompt,
        finish_reason=done.finish_reason,
        started_s=finished_s - done.duration_s,
        finished_s=finished_s,
        engine=site,
        restarts=done.restarts,
        reward=done.own_reward,
        turns=done.turns,
    )
    _require(done.restarts >= 0, f"{done.restarts} restarts")
    _require(0 <= done.duration_s <= MOST_S, f"a duration of {done.duration_s} s")
    if rules.plays is None:
        _check_response(rules, done, sample, prompt)
    else:
        _check_trajectory(rules, rules.plays, done, sample)
    _check_cache(rules, sample)
    _check_versions(sample, may_have, rises=rules.plays is None)
    _check_routing(rules, sample)
    sample = replace(sample, rollout=rollout)
    return _scored(rules, sample, done) if scores else sample


def _check_response(rules: SampleRules, done: SiteDone, sample: Sample, prompt: Prompt) -> None:
    rollout = sample.rollout
    _require(len(rollout.runs) == 1, f"{len(rollout.runs)} runs of sampled tokens, sites have 1")
    _require(
        np.array_equal(rollout.prompt.token_ids_P, prompt.token_ids_P),
        "the response of another prompt",
    )
    alone = done.own_reward is None and not done.turns
    _require(alone, "an environment's figures, of which there is none")
    ids_T, kind = rollout.response_ids_T, done.finish_reason
    _require(kind in FINISH_REASONS, f"finish_reason {one_line(repr(kind), 40)}")
    inside = int(ids_T.min()) >= 0 and int(ids_T.max()) < rules.vocab_size
    _require(inside, f"an id outside the vocabulary of {rules.vocab_size}")
    most = prompt.max_new_tokens or rules.max_new_tokens
    fault = length_fault(len(ids_T), kind, most, len(prompt.token_ids_P), NOTHING_KNOWN)
    if fault is not None:
        raise Forged(fault)


def _check_trajectory(
    rules: SampleRules, limits: TrajectoryLimits, done: SiteDone, sample: Sample
) -> None:
    """Check what an environment has said, as far as it is known here. Forged."""
    rollout, turns = sample.rollout, done.turns
    for ids_S in rollout.sequences:
        inside = int(ids_S.min()) >= 0 and int(ids_S.max()) < rules.vocab_size
        _require(inside, f"an id outside the vocabulary of {rules.vocab_size}")
    turn, sequence = max(run.num_tokens for run in rollout.runs), max(map(len, rollout.sequences))
    sampled = rollout.num_response_tokens
    _require(turn <= limits.max_turn_tokens, f"a turn of {turn} tokens")
    _require(sequence <= limits.max_tokens, f"a sequence of {sequence} tokens")
    _require(sampled <= limits.most_sampled, f"a trajectory of {sampled} sampled tokens")
    _require(len(turns) <= limits.max_turns, f"{len(turns)} turns")
    ends = ("stop", "length")
    _require(done.finish_reason in ends, f"it ended by {one_line(repr(done.finish_reason), 40)}")
    fault = turns_fault(rollout.runs, turns, done.own_reward)
    if fault is not None:
        raise Forged(fault)


def _check_cache(rules: SampleRules, sample: Sample) -> None:
    draws = sample.rollout.draws
    ids_N, weight_N, logp_N = draws.ids_N, draws.weight_N, draws.sampler_logp_N
    starts_T = draws.offsets_T1[:-1]
    same = np.array_equal(ids_N[draws.path_T], sample.rollout.response_ids_T)
    _require(same, "a path of other tokens than the response's")
    inside = int(ids_N.min()) >= 0 and int(ids_N.max()) < rules.vocab_size
    _require(inside, f"a cached id outside the vocabulary of {rules.vocab_size}")
    widest = int(np.diff(draws.offsets_T1).max())
    _require(widest <= rules.widest, f"{widest} cached ids of a token, at most {rules.widest}")
    rises_N = np.diff(ids_N, prepend=-1) > 0
    rises_N[starts_T] = True
    _require(bool(rises_N.all()), "cached ids of a token that do not rise")
    _require(bool((np.isfinite(weight_N) & (weight_N >= 0)).all()), "weights that cannot be")
    _require(_row_sums(weight_N, starts_T) <= 1 + MASS_SLACK, "weights that add up to more than 1")
    theirs = rules.estimator.support.owner == "teacher"
    known_N = np.ones(len(ids_N), bool)
    if theirs:  # of ids that the teacher selected, only the path's are known
        known_N = ~np.isnan(logp_N)
        known_N[draws.path_T] = True
    _check_logp(logp_N[known_N], "sampler")
    probs_N = np.where(known_N, np.exp(np.where(known_N, logp_N, 0).astype(np.float64)), 0)
    _require(
        _row_sums(probs_N, starts_T) <= 1 + MASS_SLACK,
        "log-probs of the sampler whose probabilities add up to more than 1",
    )


def _check_versions(sample: Sample, may_have: Callable[[int], bool], *, rises: bool) -> None:
    found = [span.version for span in sample.rollout.spans]
    _require(not rises or found == sorted(found), "versions that fall")
    for version in found:
        _require(may_have(version), f"version {version}, which the site did not serve")


def _check_routing(rules: SampleRules, sample: Sample) -> None:
    experts, gates = sample.rollout.experts_XLk, sample.rollout.gates_XLk
    if rules.routes is None:
        _require(experts is None, "routed experts that were not asked for")
        return
    layers, topk, count = rules.routes
    fits = experts is not None and experts.shape[1:] == (layers, topk)
    _require(fits, f"no routed experts of {layers} layers and {topk} a token")
    assert experts is not None
    _require(int(experts.max()) < count, f"an expert that is none of {count}")
    if gates is not None:
        sound = bool(np.isfinite(gates).all()) and bool((gates >= 0).all())
        _require(sound, "weights of experts that cannot be")


def _scored(rules: SampleRules, sample: Sample, done: SiteDone) -> Sample:
    """Return the sample with its reward, and what its length does. Forged: scores that are none."""
    prompt, reward = sample.rollout.prompt, done.reward
    try:
        length = judged_length(rules.overlong, sample.rollout, rules.limit(prompt))
    except SampleRejected as rejected:
        raise Forged(f"a response that is to be dropped: {rejected}") from None
    same = done.masked == length.masked and math.isclose(
        done.overlong_penalty, length.penalty, abs_tol=1e-9
    )
    _require(same, "another consequence of the response's length than ours")
    needs = rules.estimator.needs_teacher(prompt.reward_weight, prompt.teacher_weight)
    if not np.isnan(sample.teacher_logp_N).all():
        _check_logp(sample.teacher_logp_N, "teacher")
    else:
        _require(not needs or length.masked, "no scores of the teacher")
    parts = _parts(sample, done)
    if reward is None:
        _require(not rules.estimator.needs_reward(prompt.reward_weight), "no reward")
    elif sample.rollout.reward is not None:
        _require(reward == sample.rollout.reward, f"a reward of {reward}, not its environment's")
    else:
        _require(0 <= reward <= 1, f"a reward of {reward}")
    return replace(
        sample,
        reward=reward,
        overlong_penalty=length.penalty,
        masked=length.masked,
        parts=parts,
    )


def _parts(sample: Sample, done: SiteDone) -> ScoreParts:
    """Return what each teacher of a mixture said. Forged: not what these can have said."""
    mixture = sample.rollout.prompt.mixture
    if not mixture or not sample.has_scores:
        return ()
    names, tokens = [name for name, _ in mixture], sample.rollout.num_response_tokens
    sound = done.shape is not None and shape_fault(done.shape, tokens, names) is None
    _require(sound, "scores without those of each teacher of a mixture")
    assert done.shape is not None
    return done.shape.parts


def _check_logp(logp: FloatArray, whose: str) -> None:
    sound = bool(np.isfinite(logp).all()) and bool((logp <= LOGP_SLACK).all())
    _require(sound, f"log-probs of the {whose} that are above 0 or no numbers")


def _row_sums(values_N: np.ndarray, starts_T: OffsetArray) -> float:
    """Return the largest sum of a row."""
    return float(np.add.reduceat(values_N, starts_T, dtype=np.float64).max())


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise Forged(fault)
