"""Values and gradients of aligned losses, against float64 loops over enumerated toy models."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.alignment import Unaligned
from megatron_opd.config.estimator import Estimator
from megatron_opd.metrics.alignment import scored_shares
from megatron_opd.records.types import Sample
from megatron_opd.rollout.alignment.reading import Reader
from megatron_opd.rollout.alignment.scoring import aligned_ask, aligned_scores
from sglang_bridge.protocol import ScoreReply
from tests.support.aligning import (
    OURS,
    PROMPT_Q,
    THEIRS,
    Toy,
    ask_of,
    evaluated,
    reader_of,
    sampled,
)

STUDENT, TEACHER = Toy(OURS, 1), Toy(THEIRS, 2)
END = STUDENT.end
RESPONSES = [
    response
    for length in (1, 2, 3)
    for response in product((0, 1, 2, 3, END), repeat=length)
    if END not in response[:-1]
]
REVERSE = Estimator.model_validate({"support": {"type": "mc", "m": 1}})
CHUNKED = Estimator.model_validate(
    {"support": {"type": "path"}, "objective": {"type": "reverse_kl", "advantage": "rollout"}}
)


def scored(
    sample: Sample, unaligned: Unaligned = "drop", teacher: Toy = TEACHER, student: Toy = STUDENT
) -> Sample:
    ask = aligned_ask(sample, reader_of(student, teacher), ask_of())
    return aligned_scores(sample, ask, teacher.serve(ask.request), unaligned)


def whole(response, weight=1.0) -> Sample:
    """A cache of all ids, each weighing its probability."""
    rows = [
        dict(enumerate((weight * np.exp(STUDENT.logp_V(response[:t]))).tolist()))
        for t in range(len(response))
    ]
    return sampled(STUDENT, response, rows)


def loss_and_gradient(est: Estimator, found: Sample, size: int = len(OURS)):
    """The loss of each token and its gradient by log p, float64 [T, V], at log p = log o."""
    draws = found.rollout.draws
    student_N = torch.tensor(draws.sampler_logp_N, dtype=torch.float64, requires_grad=True)
    loss_T = evaluated(est, found, student_N).terms[0].loss_T
    (gradient_N,) = torch.autograd.grad(loss_T.sum(), student_N)
    gradient_TV = np.zeros((draws.num_tokens, size))
    row_N = np.repeat(np.arange(draws.num_tokens), np.diff(draws.offsets_T1))
    gradient_TV[row_N, draws.ids_N] = gradient_N.numpy()
    return loss_T.detach().numpy(), gradient_TV


def oracle(response, shift: int = 0):
    """Loops: where a token is one of the teacher's too, over ids with a token of the same bytes."""
    text = b"".join(OURS[i] or b"" for i in response)
    theirs = TEACHER.encode(text.decode())
    starts = {len(b"".join(THEIRS[i] or b"" for i in theirs[:r])): r for r in range(len(theirs))}
    if response[-1] == END:
        starts[len(text)] = len(theirs)
        theirs = [*theirs, TEACHER.end]
    value_T, gradient_TV = np.zeros(len(response)), np.zeros((len(response), len(OURS)))
    for t in range(len(response)):
        begin = len(b"".join(OURS[i] or b"" for i in response[:t]))
        if begin not in starts or OURS[response[t]] != THEIRS[theirs[starts[begin]]]:
            continue
        before = [*PROMPT_Q, *theirs[: max(0, starts[begin] + shift)]]
        for i, spelt in enumerate(OURS):
            twin = TEACHER.end if i == END else THEIRS.index(spelt) if spelt in THEIRS else None
            if twin is None:
                continue
            logp = STUDENT.logp_V(response[:t])[i]
            ratio = logp - TEACHER.logp_V(before)[twin]
            value_T[t] += np.exp(logp) * ratio
            gradient_TV[t, i] = np.exp(logp) * ratio
    return value_T, gradient_TV


def test_responses_have_tokens_of_every_kind() -> None:
    rows = [reader_of(STUDENT, TEACHER).read(each).spans.same_T for each in RESPONSES]
    assert len(RESPONSES) > 50
    assert sum(bool((row_T >= 0).any()) for row_T in rows) > 40
    assert any((row_T < 0).any() for row_T in rows)
    assert any((row_T > np.arange(len(row_T))).any() for row_T in rows)


@pytest.mark.parametrize("response", RESPONSES)
def test_drop_is_the_divergence_over_what_has_a_score(response) -> None:
    value_T, gradient_TV = oracle(response)
    if not value_T.any():
        with pytest.raises(ScoreRejected, match="teacher_unaligned"):
            scored(whole(response))
        return
    loss_T, found_TV = loss_and_gradient(REVERSE, scored(whole(response)))
    np.testing.assert_allclose(loss_T, value_T, atol=2e-6)
    np.testing.assert_allclose(found_TV, gradient_TV, atol=2e-6)


def test_a_shift_by_one_token_of_the_teacher_is_seen() -> None:
    gaps = []
    for response in [each for each in RESPONSES if oracle(each)[0].any()]:
        loss_T, _ = loss_and_gradient(REVERSE, scored(whole(response)))
        gaps.append(np.abs(loss_T - oracle(response, shift=-1)[0]).max())
    assert np.median(gaps) > 0.05


def test_a_shift_by_one_byte_is_seen() -> None:
    """Of the student's boundaries: what a wrong table of bytes would do."""
    response = (0, 1, 2, END)
    longer = Toy((b"a", b"ab", b"ab", b"bb", b"c", None), 1)
    ask = aligned_ask(whole(response), reader_of(longer, TEACHER), ask_of())
    found = aligned_scores(whole(response), ask, TEACHER.serve(ask.request), "drop")
    assert np.abs(loss_and_gradient(REVERSE, found)[0] - oracle(response)[0]).max() > 0.05


@pytest.mark.parametrize("response", [(0, 2, 1), (2, 3, END), (1, 1, END)])
def test_draws_are_unbiased_over_what_has_a_score(response) -> None:
    """One draw a position, enumerated: positions do not share draws, so that each is averaged."""
    mean_T, mean_TV = np.zeros(len(response)), np.zeros((len(response), len(OURS)))
    for i in range(len(OURS)):
        try:
            found = scored(sampled(STUDENT, response, [{i: 1.0}] * len(response)))
        except ScoreRejected:
            continue  # no draw has a score: it adds 0
        loss_T, gradient_TV = loss_and_gradient(REVERSE, found)
        p_T = np.exp([STUDENT.logp_V(response[:t])[i] for t in range(len(response))])
        mean_T += p_T * loss_T
        mean_TV += p_T[:, None] * gradient_TV
    value_T, gradient_TV = oracle(response)
    np.testing.assert_allclose(mean_T, value_T, atol=2e-6)
    np.testing.assert_allclose(mean_TV, gradient_TV, atol=2e-6)


def test_a_twin_has_the_probability_of_its_bytes_less_that_of_longer_tokens() -> None:
    """The bias: q of the bytes is that of every token that begins with them."""
    q_V = np.exp(TEACHER.logp_V(PROMPT_Q))
    found = scored(whole((0, END)))
    for i, spelt in ((0, b"a"), (1, b"b")):
        marginal = sum(q_V[v] for v, each in enumerate(THEIRS) if each and each.startswith(spelt))
        longer = sum(
            q_V[v]
            for v, each in enumerate(THEIRS)
            if each and each.startswith(spelt) and len(each) > 1
        )
        assert longer > 0.01
        row = found.rollout.draws.ids_N[: found.rollout.draws.offsets_T1[1]].tolist()
        score = float(np.exp(found.teacher_logp_N[row.index(i)]))
        assert score == pytest.approx(marginal - longer, abs=1e-6)


def pushed_out(est: Estimator, logp_V: np.ndarray, logq_V: np.ndarray) -> float:
    """How fast a step down the gradient changes log of the mass that "a" and "b" of five ids have.

    logq_V: of "a" and "b"; the other ids have no score.
    """
    found = sampled(STUDENT, (4,), [dict(enumerate(np.exp(logp_V)[:2].tolist()))])
    draws = found.rollout.draws
    own_N = np.append(logp_V[:2], logp_V[4]).astype(np.float32)
    draws = replace(draws, sampler_logp_N=own_N)
    found = replace(
        found,
        rollout=replace(found.rollout, draws=draws),
        teacher_logp_N=np.append(logq_V, logp_V[4]).astype(np.float32),
    )
    _, gradient_TV = loss_and_gradient(est, found)
    p_V, pull_V = np.exp(logp_V), gradient_TV[0, :5]
    by_logits_V = pull_V - p_V * pull_V.sum()  # of log p by the logits
    step_V = -by_logits_V
    return float(p_V[:2] @ step_V[:2] / p_V[:2].sum() - p_V @ step_V)


@pytest.mark.parametrize("apart", [0.0, 3.0])
def test_drop_lets_a_student_leave_for_ids_without_a_score(apart: float) -> None:
    """The bias: where the scored ids are far apart, probability goes to those without a score.

    A loss that is renormalised to the scored ids does not move their mass.
    """
    logp_V = np.log([0.3, 0.3, 0.1, 0.1, 0.2])
    logq_V = np.log([0.3, 0.3]) - np.array([0.0, apart])  # teacher and student agree on "a"
    sets = {"support": {"type": "topk", "k": 5}}
    renormalised = sets | {"objective": {"type": "sparse_reverse_kl"}}
    out = pushed_out(REVERSE, logp_V, logq_V)
    assert (out < -0.1) if apart else (abs(out) < 1e-6)
    assert abs(pushed_out(Estimator.model_validate(renormalised), logp_V, logq_V)) < 1e-6


def test_drop_divides_by_all_tokens() -> None:
    """The bias: token_mean counts a token without a score as one of divergence 0."""
    response = (0, 2, END)
    found = scored(whole(response))
    draws = found.rollout.draws
    student_N = torch.tensor(draws.sampler_logp_N, dtype=torch.float64)
    held = evaluated(REVERSE, found, student_N)
    value_T, _ = oracle(response)
    assert value_T[1] == 0, "no token of the teacher's begins at the second of a, ab"
    assert held.count == len(response)
    assert held.loss_sum.item() == pytest.approx(value_T.sum(), abs=2e-6)


def test_a_chunk_has_the_probability_of_the_teacher_s_own_cut_alone() -> None:
    """The bias: Q of a text is that of all cuts into the teacher's tokens, a chunk's of one."""
    cuts = [(THEIRS.index(b"a"), THEIRS.index(b"ab")), (THEIRS.index(b"aab"),)]
    text, logq = b"aab", []
    for cut in (*cuts, (THEIRS.index(b"a"), THEIRS.index(b"a"), THEIRS.index(b"b"))):
        assert b"".join(THEIRS[i] or b"" for i in cut) == text
        before = list(PROMPT_Q)
        logq.append(sum(TEACHER.logp_V([*before, *cut[:n]])[i] for n, i in enumerate(cut)))
    whole_q = np.exp(logq).sum()
    found = scored(sampled(STUDENT, (0, 2), [{0: 1.0}, {2: 1.0}]), "chunk")
    own_T = found.rollout.draws.sampler_logp_N.astype(np.float64)
    log_ratio = float(found.teacher_logp_N[0] - own_T[0])
    chunk_q = np.exp(log_ratio + own_T.sum())
    assert chunk_q == pytest.approx(np.exp(logq[1]), rel=1e-5)
    assert chunk_q < whole_q - 0.001


def test_equal_tokenizers_give_the_scores_of_the_path_itself() -> None:
    same = Toy(OURS, 2)
    response = (0, 2, 4, END)
    found = scored(whole(response), teacher=same)
    draws = found.rollout.draws
    for t in range(len(response)):
        row = slice(draws.offsets_T1[t], draws.offsets_T1[t + 1])
        logq_V = same.logp_V([*PROMPT_Q, *response[:t]])
        assert draws.ids_N[row].tolist() == list(range(len(OURS)))
        np.testing.assert_allclose(found.teacher_logp_N[row], logq_V, atol=1e-6)
    assert scored_shares(draws) == (1.0, pytest.approx(1.0))


def test_what_has_no_score_weighs_nothing() -> None:
    """ "c" has no twin, and of "ab", "a", "ab" the teacher's tokens are "ab", "aab"."""
    rows = [{4: 0.25, 0: 0.5, 2: 0.25}, {0: 1.0}, {2: 1.0}, {END: 1.0}]
    found = scored(sampled(STUDENT, (2, 0, 2, END), rows))
    draws = found.rollout.draws
    assert draws.ids_N.tolist() == [0, 2, 0, 2, END]
    assert draws.weight_N.tolist() == [0.5, 0.25, 0.0, 0.0, 1.0]
    assert draws.path_T.tolist() == [1, 2, 3, 4]
    assert found.teacher_logp_N[2:4].tolist() == draws.sampler_logp_N[2:4].tolist()
    assert scored_shares(draws) == (pytest.approx(2 / 4), pytest.approx(1.75 / 4))
    assert found.aligned is not None
    assert found.aligned.scored_T.tolist() == [1, 0, 0, 1]


def test_nothing_aligned_drops_the_sample() -> None:
    with pytest.raises(ScoreRejected, match=r"teacher_unaligned.*prompt 7"):
        scored(sampled(STUDENT, (0, END), [{4: 1.0}] * 2))

    def nothing(text: str) -> list[int]:
        return []

    broken = Reader(STUDENT.tokens, TEACHER.tokens, nothing)
    with pytest.raises(ScoreRejected, match=r"teacher_unaligned.*reads none of the response's 2"):
        aligned_ask(whole((0, 1)), broken, ask_of())


def test_a_reply_of_another_length_drops_the_sample() -> None:
    ask = aligned_ask(whole((0, END)), reader_of(STUDENT, TEACHER), ask_of())
    with pytest.raises(ScoreRejected, match="teacher_misshapen"):
        aligned_scores(whole((0, END)), ask, ScoreReply(np.zeros(1, np.float32)), "drop")


# chunks: two bytes of the student's are one token of the teacher's, whatever they are
SHORT = Toy((b"a", b"b", None), 3)
PAIRS = Toy((None, b"aa", b"ab", b"ba", b"bb"), 4)


def path_of(response, student: Toy = SHORT) -> Sample:
    return sampled(student, response, [{i: 1.0} for i in response])


def chunk_oracle(length: int):
    """Loops over all responses: sum over chunks of E_prefix KL(P || Q), and its gradient by logits.

    The prefix's own distribution is held fixed, as a loss on sampled text holds it.
    """
    logits = {
        before: torch.tensor(SHORT.logp_V(before), dtype=torch.float64, requires_grad=True)
        for n in range(length)
        for before in product((0, 1), repeat=n)
    }
    # of 2 ids: the end never comes, so that all responses are of one length
    logp = {before: each[:2].log_softmax(0) for before, each in logits.items()}
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, length, 2):
        for before in product((0, 1), repeat=start):
            reach = np.exp(sum(logp[before[:t]][before[t]].item() for t in range(start)))
            theirs = PAIRS.encode("".join("ab"[i] for i in before))
            for chunk in product((0, 1), repeat=2):
                log_p = logp[before][chunk[0]] + logp[(*before, chunk[0])][chunk[1]]
                (token,) = PAIRS.encode("".join("ab"[i] for i in chunk))
                log_q = PAIRS.logp_V([*PROMPT_Q, *theirs])[token]
                total = total + reach * log_p.exp() * (log_p - log_q)
    gradients = torch.autograd.grad(total, list(logits.values()))
    return total.item(), dict(zip(logits, gradients, strict=True)), logp


@pytest.mark.parametrize("length", [2, 4])
def test_chunks_have_the_gradient_of_the_chunks_divergence(length: int) -> None:
    """E over all responses of sum_t A_chunk grad log p_t; the value counts a chunk once a token."""
    value, gradients, logp = chunk_oracle(length)
    found_value = 0.0
    found = {before: torch.zeros(3, dtype=torch.float64) for before in logp}
    for response in product((0, 1), repeat=length):
        own_T = [logp[response[:t]][response[t]].item() for t in range(length)]
        sample = path_of(response)
        draws = replace(sample.rollout.draws, sampler_logp_N=np.array(own_T, np.float32))
        sample = replace(sample, rollout=replace(sample.rollout, draws=draws))
        chunked = scored(sample, "chunk", PAIRS, SHORT)
        loss_T, gradient_TV = loss_and_gradient(CHUNKED, chunked, 3)
        probability = np.exp(sum(own_T))
        found_value += probability * loss_T.sum()
        for t in range(length):
            gradient = torch.tensor(gradient_TV[t, response[t]])
            score_V = -logp[response[:t]].exp().detach()
            score_V[response[t]] += 1  # grad log p by the logits
            found[response[:t]][:2] += probability * gradient * score_V
    assert found_value == pytest.approx(2 * value, abs=2e-6)
    for before, gradient in gradients.items():
        np.testing.assert_allclose(found[before].numpy(), gradient.numpy(), atol=2e-6)
    assert max(g.abs().max().item() for g in gradients.values()) > 0.05


def test_a_chunk_gives_all_its_tokens_its_own_log_ratio() -> None:
    sample = path_of((0, 1, 1, 1, 2))
    found = scored(sample, "chunk", PAIRS, SHORT)
    advantage_T = found.teacher_logp_N - sample.rollout.draws.sampler_logp_N
    own_T = sample.rollout.draws.sampler_logp_N
    ids = [2, 4, 0]
    log_q = [PAIRS.logp_V([*PROMPT_Q, *ids[:r]])[ids[r]] for r in range(3)]
    log_ratio = [
        log_q[0] - own_T[:2].sum(),
        log_q[1] - own_T[2:4].sum(),
        log_q[2] - own_T[4],
    ]
    np.testing.assert_allclose(advantage_T, np.array(log_ratio)[[0, 0, 1, 1, 2]], atol=2e-6)
    assert scored_shares(found.rollout.draws) == (1.0, 1.0)


def test_a_token_beyond_the_last_chunk_has_no_score() -> None:
    odd = Toy((None, b"aa", b"ab", b"ba", b"bb", b"a", b"b", b"bbb"), 4)
    student = Toy((b"a", b"b", b"\xc3", None), 3)
    found = scored(path_of((0, 1, 2), student), "chunk", odd, student)
    assert found.rollout.draws.weight_N.tolist() == [1.0, 1.0, 0.0]
    assert found.teacher_logp_N[2] == found.rollout.draws.sampler_logp_N[2]


def test_chunks_of_more_than_the_path_are_no_use() -> None:
    with pytest.raises(ValueError, match="of the path alone"):
        scored(whole((0, 1, END)), "chunk")
