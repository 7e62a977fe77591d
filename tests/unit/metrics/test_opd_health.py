"""How student and teacher agree: against whole distributions in float64, token by token."""

import math

import numpy as np
import pytest

from megatron_opd.metrics.opd_health import ScoredSelection, likeliest, measure, tokens_with
from sglang_bridge.protocol import Selection
from tests.support.selections import select

VOCABULARY, TOP_K = 40, 6
ENDS = frozenset({3, 17})


def distributions(seed: int, tokens: int, near: float) -> tuple[np.ndarray, np.ndarray]:
    """log p and log q, [T, V] float64: q is p with noise of `near` nats."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 2.5, (tokens, VOCABULARY))
    other = logits + generator.normal(0, near, logits.shape)

    def normalised(x):
        return x - np.logaddexp.reduce(x, axis=1, keepdims=True)

    return normalised(logits), normalised(other)


def scored(
    p_TV: np.ndarray, q_TV: np.ndarray, top_k: int, draws: int, seed: int
) -> ScoredSelection:
    generator = np.random.default_rng(seed)
    ends = [sorted(ENDS)] * len(p_TV)
    student = select(p_TV, ends, top_k, draws, generator)
    rows = np.split(student.ids_N, student.offsets_T1[1:-1])
    return ScoredSelection(student, select(q_TV, rows, top_k, draws, generator))


def oracle(p_TV: np.ndarray, q_TV: np.ndarray) -> dict[str, float]:
    """The definitions, one token and one id at a time."""
    overlaps, advantages, masses, divergences, eos, gaps = [], [], [], [], [], []
    for p, q in zip(p_TV, q_TV, strict=True):
        ours = set(np.argsort(-p)[:TOP_K].tolist())
        both = ours & set(np.argsort(-q)[:TOP_K].tolist())
        overlaps.append(len(both) / TOP_K)
        if both:
            advantages.append(sum(math.exp(q[k]) * (p[k] - q[k]) for k in both) / len(both))
        masses.append(sum(math.exp(q[k]) for k in ours))
        divergences.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
        a, b = (sum(math.exp(logp[k]) for k in ENDS) for logp in (p, q))
        eos.append(a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)))
        gaps.append(a - b)
    losses = sorted(map(abs, divergences), reverse=True)
    few = next(n for n in range(1, len(losses) + 1) if sum(losses[:n]) >= 0.8 * sum(losses))
    return {
        "topk_overlap": float(np.mean(overlaps)),
        "overlap_advantage": float(np.mean(advantages)),
        "teacher_mass": float(np.mean(masses)),
        "student_entropy_nats": float(np.mean([-sum(np.exp(p) * p) for p in p_TV])),
        "teacher_entropy_nats": float(np.mean([-sum(np.exp(q) * q) for q in q_TV])),
        "loss_tokens_80": few / len(losses),
        "eos_kl_nats": float(np.mean(eos)),
        "eos_gap": float(np.mean(gaps)),
    }


@pytest.mark.parametrize("near", [0.1, 1.0, 4.0])
def test_figures_of_whole_distributions_equal_the_definitions(near: float):
    p_TV, q_TV = distributions(1, 23, near)
    # all ids are there, and of these the likeliest are compared
    halves = ((p_TV[:9], q_TV[:9]), (p_TV[9:], q_TV[9:]))
    parts = [scored(p, q, VOCABULARY, 0, 0) for p, q in halves]
    found = measure(parts, TOP_K, ENDS)
    assert found.tokens == 23
    for name, value in oracle(p_TV, q_TV).items():
        assert getattr(found, name) == pytest.approx(value, rel=2e-6, abs=2e-7), name


def test_draws_from_the_tail_estimate_what_the_likeliest_ids_leave_out():
    """Overlap, mass and ending need no draws and are exact; entropies are right on average."""
    p_TV, q_TV = distributions(2, 11, 1.0)
    found = [measure([scored(p_TV, q_TV, TOP_K, 16, s)], TOP_K, ENDS) for s in range(400)]
    wanted = oracle(p_TV, q_TV)
    for name in ("topk_overlap", "overlap_advantage", "teacher_mass", "eos_kl_nats", "eos_gap"):
        values = [getattr(one, name) for one in found]
        assert values == pytest.approx([wanted[name]] * len(found), rel=2e-6, abs=2e-7), name
    for name in ("student_entropy_nats", "teacher_entropy_nats"):
        values = [getattr(one, name) for one in found]
        error = np.std(values) / math.sqrt(len(values))
        assert 0 < error < 0.02 * wanted[name]
        assert abs(np.mean(values) - wanted[name]) < 4 * error, name


def test_a_student_that_is_its_teacher():
    p_TV, _ = distributions(3, 7, 1.0)
    found = measure([scored(p_TV, p_TV, TOP_K, 16, 0)], TOP_K, ENDS)
    assert found.topk_overlap == 1
    assert found.overlap_advantage == 0
    assert found.loss_tokens_80 is None, "nothing is lost anywhere"
    assert found.eos_kl_nats == found.eos_gap == 0


def test_nothing_that_overlaps_has_no_advantage():
    p_TV = np.log(np.tile(np.linspace(1, 40, VOCABULARY) / 820, (5, 1)))
    found = measure([scored(p_TV, p_TV[:, ::-1], 2, 4, 0)], 2, ENDS)
    assert found.topk_overlap == 0
    assert found.overlap_advantage is None
    assert found.columns()["health_overlap_advantage"] is None


@pytest.mark.parametrize(
    ("losses", "share"),
    [
        ([1, 1, 1, 1, 1], 0.8),
        ([0, 0, 10, 0, 0, 0, 0, 0, 0, 0], 0.1),
        ([8, 1, 1], 1 / 3),
        ([7.9, 1.1, 1], 2 / 3),
        ([0, 0], None),
        ([2], 1.0),
    ],
)
def test_the_share_of_tokens_with_most_of_the_loss(losses: list[float], share: float | None):
    assert tokens_with(0.8, np.array(losses, dtype=np.float64)) == share


def test_the_likeliest_of_rows_of_unequal_length():
    offsets = np.array([0, 3, 4, 9])
    logp = np.array([-3.0, -1, -2, -9, -5, -1, -4, -2, -3])
    assert likeliest(offsets, logp, 2).tolist() == [
        *(False, True, True),
        True,
        *(False, True, False, True, False),
    ]


def test_a_selection_of_the_oracle_is_what_servers_send():
    p_TV, _ = distributions(5, 3, 1.0)
    found: Selection = select(p_TV, [[3, 17]] * 3, TOP_K, 16, np.random.default_rng(0))
    for t in range(3):
        row = slice(*found.offsets_T1[t : t + 2])
        assert found.weight_N[row].sum() == pytest.approx(1, abs=1e-6)
        assert (np.diff(found.ids_N[row]) > 0).all()
        assert {3, 17} <= set(found.ids_N[row].tolist())
    assert found.ids_N[found.given_N].tolist() == [3, 17] * 3
