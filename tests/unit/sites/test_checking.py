"""What a keyed site can send that is no sample of its prompt is refused, in one line."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.selection import MaskOverlong, OverlongConfig, SoftPenalty
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.types import VersionSpan
from megatron_opd.sites.checking import Forged, received_sample
from megatron_opd.transport.samples import encode_sample
from tests.support.fakes import make_prompt
from tests.support.hub_links import RULES, done_of, sample_of
from tests.support.mixed_teachers import mixed_prompt

PROMPT = make_prompt(0)
HEALTHY = sample_of(PROMPT, version=3)


def received(sample=HEALTHY, rules=RULES, frames=None, scores=True, **changes):
    async def run():
        return received_sample(
            rules,
            PROMPT,
            done_of(0, **changes),
            encode_sample(sample) if frames is None else frames,
            may_have=lambda version: version in (2, 3),
            scores=scores,
            site="a",
            delay_s=5.0,
        )

    return asyncio.run(run())


def with_draws(**columns):
    rollout = HEALTHY.rollout
    return replace(HEALTHY, rollout=replace(rollout, draws=replace(rollout.draws, **columns)))


def with_spans(*spans):
    return replace(HEALTHY, rollout=replace(HEALTHY.rollout, spans=spans))


def logp(value):
    column = HEALTHY.rollout.draws.sampler_logp_N.copy()
    column[0] = value
    return with_draws(sampler_logp_N=column)


def ids(*values):
    """Cached ids of the first token; the response begins with the first of them."""
    ids_N, ids_S = HEALTHY.rollout.draws.ids_N.copy(), HEALTHY.rollout.sequences[0].copy()
    ids_N[:2], ids_S[HEALTHY.rollout.runs[0].start] = values, values[0]
    rollout = replace(HEALTHY.rollout, sequences=(ids_S,))
    return replace(HEALTHY, rollout=replace(rollout, draws=replace(rollout.draws, ids_N=ids_N)))


def scores(value):
    column = HEALTHY.teacher_logp_N.copy()
    column[1] = value
    return replace(HEALTHY, teacher_logp_N=column)


def other_prompt():
    ids_S = HEALTHY.rollout.sequences[0].copy()
    ids_S[0] += 1
    return replace(HEALTHY, rollout=replace(HEALTHY.rollout, sequences=(ids_S,)))


def test_a_sound_sample_is_taken_with_our_prompt_and_our_clock():
    found = received(duration_s=2.0, restarts=1)
    assert found.rollout.prompt is PROMPT
    assert found.rollout.engine == "a"
    assert found.rollout.restarts == 1
    assert found.rollout.finished_s - found.rollout.started_s == pytest.approx(2.0)
    assert found.rollout.spans == HEALTHY.rollout.spans
    assert found.rollout.response_ids_T.tolist() == HEALTHY.rollout.response_ids_T.tolist()


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (other_prompt(), "another prompt"),
        (ids(99, 100), "outside the vocabulary"),
        (ids(4, 99), "outside the vocabulary"),
        (ids(9, 4), "do not rise"),
        (ids(4, 4), "do not rise"),
        (logp(0.5), "above 0"),
        (logp(-np.inf), "no numbers"),
        (logp(-0.1), "add up to more than 1"),
        (scores(0.5), "of the teacher"),
        (scores(-np.inf), "of the teacher"),
        (with_draws(weight_N=np.full(8, 0.9, np.float32)), "weights that add up"),
        (with_draws(weight_N=np.full(8, -0.1, np.float32)), "weights that cannot be"),
        (with_spans(VersionSpan(4, 0, 4)), "version 4, which the site did not serve"),
        (with_spans(VersionSpan(3, 0, 2), VersionSpan(2, 2, 4)), "versions that fall"),
        (replace(HEALTHY, teacher_logp_N=np.full(8, np.nan, np.float32)), "no scores"),
        (sample_of(PROMPT, 3, tokens=9), "at most 8 tokens"),
        (
            replace(
                HEALTHY,
                rollout=replace(HEALTHY.rollout, experts_XLk=np.zeros((6, 1, 1), np.uint8)),
            ),
            "not asked for",
        ),
    ],
)
def test_what_no_sample_holds_is_refused(sample, words):
    with pytest.raises(Forged, match=words) as refused:
        received(sample)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finish_reason": "abort"}, "finish_reason 'abort'"),
        ({"duration_s": -1.0}, "duration"),
        ({"duration_s": float("nan")}, "duration"),
        ({"restarts": -1}, "restarts"),
        ({"reward": 1.5}, "a reward of 1.5"),
        ({"reward": float("nan")}, "a reward of nan"),
        ({"masked": True}, "length"),
        ({"overlong_penalty": -0.5}, "length"),
        ({"overlong_penalty": float("nan")}, "length"),
    ],
)
def test_figures_that_cannot_be_are_refused(changes, words):
    with pytest.raises(Forged, match=words):
        received(**changes)


@pytest.mark.parametrize("frames", [(), (b"",) * 4, (b"\x00",) * 4, (b"",) * 5])
def test_frames_that_are_no_sample_are_refused(frames):
    with pytest.raises(Forged):
        received(frames=frames)


def test_a_cut_frame_is_refused():
    frames = [bytes(frame) for frame in encode_sample(HEALTHY)]
    with pytest.raises(Forged):
        received(frames=(frames[0], frames[1][:-3], *frames[2:]))


def test_a_reward_that_the_loss_reads_must_be_there():
    tree = {"objective": {"type": "grpo"}, "support": {"type": "path"}}
    rules = replace(RULES, estimator=Estimator.model_validate(tree))
    path = with_draws(
        offsets_T1=np.arange(5, dtype=np.int64),
        ids_N=np.full(4, 4, np.int32),
        weight_N=np.ones(4, np.float32),
        sampler_logp_N=np.full(4, -0.8, np.float32),
        path_T=np.arange(4, dtype=np.int64),
    )
    unscored = replace(path, teacher_logp_N=np.full(4, np.nan, np.float32))
    with pytest.raises(Forged, match="no reward"):
        received(unscored, rules)
    assert received(unscored, rules, reward=1.0).reward == 1.0


def test_scores_of_a_mixture_come_with_those_of_each_teacher(monkeypatch):
    monkeypatch.setitem(globals(), "PROMPT", mixed := mixed_prompt(PROMPT))
    own = ScoreShape.of(np.full(4, -0.5, np.float32), 100)
    parts = (("code", own), ("math", own))
    shape = replace(own, parts=parts)
    found = received(shape=shape)
    assert (found.rollout.prompt.mixture, found.parts) == (mixed.mixture, parts)
    short = (("code", own), ("math", replace(own, rows=3)))
    nested = (("code", shape), ("math", own))
    for other in (parts[::-1], parts[:1], short, nested, ()):
        with pytest.raises(Forged, match="each teacher of a mixture"):
            received(shape=replace(own, parts=other))
    with pytest.raises(Forged, match="each teacher of a mixture"):
        received(shape=None)


def test_a_site_without_teachers_brings_no_scores():
    found = received(scores=False, reward=0.7)
    assert found.reward is None


@pytest.mark.parametrize(
    ("overlong", "limit", "reason", "penalty", "masked"),
    [
        (SoftPenalty(cache=8, scale=0.5), 8, "stop", -0.25, False),
        (MaskOverlong(), 4, "length", 0.0, True),
    ],
)
def test_the_length_is_judged_here_too(
    overlong: OverlongConfig, limit: int, reason: str, penalty: float, masked: bool
):
    rules = replace(RULES, overlong=overlong, max_new_tokens=limit)
    same = {"finish_reason": reason, "overlong_penalty": penalty, "masked": masked}
    found = received(rules=rules, **same)
    assert (found.overlong_penalty, found.masked) == (penalty, masked)
    with pytest.raises(Forged, match="length"):
        received(rules=rules, finish_reason=reason)
