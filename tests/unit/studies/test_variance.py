"""The variance study, tiny: enumeration against brute force, drawing against enumeration."""

import itertools
import math

import pytest
import torch

from studies.variance.caches import draw_caches, evaluate_caches
from studies.variance.drawn import Effort, Pair, measure_pair
from studies.variance.exact import Enumerated, Split
from studies.variance.report import study
from studies.variance.students import Training
from studies.variance.synthetic import FAMILIES, Sweep, entropy, scaled_to, sweep
from tests.support.figures import bounded
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

VOCAB = 6


def three(seed: int, rows: int = 3, spread: float = 0.7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = 2 * torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)
    others = [
        old + spread * torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)
        for _ in range(2)
    ]
    return [x.log_softmax(-1) for x in (old, *others)]


def brute(
    old: torch.Tensor, now: torch.Tensor, teacher: torch.Tensor, split: Split
) -> tuple[float, float, float]:
    """(variance of the loss, trace of its gradient's covariance, distinct ids) over all draws."""
    ranked = old.argsort(descending=True).tolist()
    atoms, tail = ranked[: split.atoms], ranked[split.atoms :]
    mass = sum(math.exp(old[a]) for a in tail)

    def estimate(drawn: tuple[int, ...]) -> tuple[float, torch.Tensor]:
        weights = [(a, math.exp(old[a])) for a in atoms] + [(a, mass / len(drawn)) for a in drawn]
        value, gradient = 0.0, torch.zeros(VOCAB, dtype=torch.float64)
        for a, weight in weights:
            f = math.exp(now[a] - old[a]) * float(now[a] - teacher[a])
            value += weight * f
            gradient += (
                weight * f * (torch.nn.functional.one_hot(torch.tensor(a), VOCAB) - now.exp())
            )
        return value, gradient

    first = second = grad_second = ids = 0.0
    grad_first = torch.zeros(VOCAB, dtype=torch.float64)
    for drawn in itertools.product(tail, repeat=split.draws):
        chance = math.prod(math.exp(old[a]) / mass for a in drawn)
        value, gradient = estimate(drawn)
        first, second = first + chance * value, second + chance * value**2
        grad_first += chance * gradient
        grad_second += chance * float(gradient.square().sum())
        ids += chance * len({*atoms, *drawn})
    return second - first**2, grad_second - float(grad_first.square().sum()), ids


@pytest.mark.parametrize("split", [Split(0, 1), Split(0, 3), Split(2, 2), Split(4, 3), Split(5, 1)])
def test_enumeration_equals_the_sum_over_every_possible_cache(split: Split):
    old, now, teacher = three(0)
    enumerated = Enumerated(old, now, teacher, most_atoms=VOCAB)
    worst = 0.0
    for row in range(len(old)):
        expected = brute(old[row], now[row], teacher[row], split)
        found = (
            float(enumerated.variance(split)[row]),
            float(enumerated.gradient_variance(split)[row]),
            float(enumerated.distinct_ids(split)[row]),
        )
        worst = max(worst, *(abs(a - b) for a, b in zip(expected, found, strict=True)))
    bounded("variance study, enumeration", worst, 1e-12)


def test_the_gradient_that_is_enumerated_is_the_learners():
    old, now, teacher = three(1, rows=1)
    logits = now.clone().requires_grad_()
    drawn = draw_caches(old.float(), Split(2, 3), torch.Generator().manual_seed(0))
    index = (drawn.row_N, drawn.ids_N)
    evaluation = evaluate_caches(drawn, logits.log_softmax(-1)[index], teacher[index])
    evaluation.loss_sum.backward()
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    for a, weight in zip(drawn.ids_N, drawn.weight_N, strict=True):
        f = (now[0, a] - old[0, a]).exp() * (now[0, a] - teacher[0, a])
        one_hot = torch.nn.functional.one_hot(a, VOCAB)
        expected += float(weight) * f * (one_hot - now[0].exp())
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0], expected, atol=1e-5, rtol=1e-5)


def test_drawn_caches_have_the_enumerated_variance_and_no_bias():
    old, now, teacher = three(2, rows=4, spread=0.4)
    pair = Pair(old.float(), now.float(), teacher.float())
    effort = Effort(2, 2, 8000, (Split(0, 1), Split(0, 4), Split(2, 2)))
    figures = measure_pair(pair, Enumerated(old, now, teacher, VOCAB), effort)
    for split in effort.splits:
        row = figures[split.name]
        assert isinstance(row, dict)
        assert abs(row["bias_z"]) < 4
        assert abs(row["r_measured"] - row["r_exact"]) < 4 * row["r_stderr"]
    wrong = Enumerated(old, teacher, now, VOCAB)  # the comparison must be able to fail
    row = measure_pair(pair, wrong, effort)["mc_4"]
    assert isinstance(row, dict)
    assert abs(row["bias_z"]) > 6


@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_logits_have_the_entropy(family: str):
    logits = FAMILIES[family](2000, torch.Generator().manual_seed(0))
    for nats in (0.05, 1.2, 5.5):
        assert entropy(scaled_to(logits, nats)) == pytest.approx(nats, rel=1e-3)


def test_the_sweep_keeps_atoms_and_tail_below_monte_carlo():
    figures = sweep(Sweep(2000, (0.05, 1.2, 4.5), (0.1,), repetitions=1))
    for family in ("gaussian", "zipf"):
        assert figures["most_of_monte_carlo_fixed"][family] < 1
    assert len(figures["rows"]) == 3 * len(FAMILIES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Training:
    root = tmp_path_factory.mktemp("students")
    prompts = root / "prompts.jsonl"
    prompts.write_text('{"prompt": "12+3="}\n{"prompt": "4-1="}\n')
    return Training(
        student=tiny_qwen3_moe(root / "student", seed=1),
        teacher=tiny_qwen3(root / "teacher", seed=2),
        prompts=prompts,
        versions=(0, 1),
        stalenesses=(1, 2),
        batch_size=4,
        rollouts=4,
        max_new_tokens=6,
    )


def test_the_study_of_real_models(tiny: Training):
    splits = (Split(0, 4),)
    figures = study(tiny, Effort(1, 1, 64, splits, pairs=((1, 2),)))
    assert [(p["old_version"], p["staleness_updates"]) for p in figures["pairs"]] == [
        *((0, 1), (0, 2), (1, 1), (1, 2))
    ]
    supports = figures["pairs"][3]["supports"]
    assert supports["mc_64"]["r_local"] == pytest.approx(1 / 64)
    assert supports["mc_64"]["r_seq_fixed"] == pytest.approx(1 / 64)
    assert supports["mc_64"]["r_seq"] > 1 / 64
    assert supports["mc_1"]["distinct_ids_per_token"] == pytest.approx(1)
    assert figures["measured"][0]["mc_4"]["r_exact"] == pytest.approx(1 / 4)
    assert figures["pairs"][0]["buckets"]
