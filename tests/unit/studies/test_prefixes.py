"""The study of a pretrained model's prefixes, tiny: sums against autograd, drawing and counting."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.tree import ROOT
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from sglang_bridge.arrays import HEADER_BYTES, narrow_weights, pack, pack_logp, pack_weights
from studies.prefixes import choice, study
from studies.prefixes.drawn import compare as drawn_module
from studies.prefixes.drawn.compare import WRONG, compare, fourth_moment, sound
from studies.prefixes.enumerate.sizes import Sizes
from studies.prefixes.enumerate.supports import (
    CUTS,
    FIXED,
    MONTE_CARLO,
    THIN,
    name_of,
    wire_bytes,
)
from studies.prefixes.enumerate.tails import SUPPORTS, Three, pair_columns
from studies.prefixes.enumerate.walk import Walk, measure_old, measure_pair
from studies.prefixes.figures import Prefixes
from studies.prefixes.report import REPORTED, concentration, report
from studies.prefixes.students import STALENESSES, commands
from studies.prefixes.truncated.sums import measure_truncated, truncated_columns
from studies.variance.caches import draw_caches
from studies.variance.exact import Enumerated, Split
from tests.support.figures import bounded

VOCAB = 300


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def three(rows: int, seed: int = 0, spread: float = 0.5) -> Three:
    sharpness = torch.linspace(0.5, 6, rows, dtype=torch.float64)[:, None]
    old = sharpness * normal(seed, rows, VOCAB)
    moved = [old + spread * normal(seed + n, rows, VOCAB) for n in (1, 2)]
    return Three(*(logits.log_softmax(-1) for logits in (old, *moved)))


def prefixes(lengths: tuple[int, ...] = (7, 5)) -> Prefixes:
    given = [three(length, seed=10 * index) for index, length in enumerate(lengths)]

    def rows(columns: list[dict[str, str]]) -> list[dict[str, Any]]:
        return [{"tokens": t, "columns": c} for t, c in zip(lengths, columns, strict=True)]

    fresh = [measure_pair(x.old_TV, x.old_TV, x.teacher_TV) for x in given]
    stale = [measure_pair(x.old_TV, x.now_TV, x.teacher_TV) for x in given]
    old = rows([measure_old(x.old_TV) for x in given])
    return Prefixes.of(old, {"0": rows(fresh), "4": rows(stale)})


def truncated(whole: Prefixes, lengths: tuple[int, ...] = (7, 5)) -> Prefixes:
    given = [three(length, seed=10 * index) for index, length in enumerate(lengths)]
    cut: dict[str, list[dict[str, Any]]] = {"0": [], "4": []}
    for length, x in zip(lengths, given, strict=True):
        for age, now in (("0", x.old_TV), ("4", x.now_TV)):
            columns = measure_truncated(x.old_TV, now, x.teacher_TV)
            cut[age].append({"tokens": length, "columns": columns})
    return whole.truncated(cut)


def test_truncated_sums_are_those_of_one_draw():
    """Every possible draw of one tail id, beside the atoms; and what truncation adds."""
    given = three(3, seed=20, spread=1.0)
    found = truncated_columns(given, 2.0)
    untouched = truncated_columns(given, math.inf)
    expected = pair_columns(given)
    for name in ("noise", "gradient_noise"):
        torch.testing.assert_close(untouched[name], expected[name], rtol=1e-9, atol=1e-14)
    for row in range(3):
        old, now, teacher = (x[row] for x in (given.old_TV, given.now_TV, given.teacher_TV))
        ratio = (now - old).exp()
        assert float(ratio.max()) > 2
        score_VV = torch.eye(VOCAB, dtype=torch.float64) - now.exp()  # row a: e_a - p
        f = ratio.clamp(max=2.0) * (now - teacher)
        full = (now.exp() * (now - teacher)) @ score_VV
        cut = (old.exp() * f) @ score_VV
        assert float(found["cut_bias"][row]) == pytest.approx(
            float((old.exp() * f).sum() - (now.exp() * (now - teacher)).sum())
        )
        squared = float((cut - full).square().sum())
        assert float(found["cut_gradient_bias"][row]) == pytest.approx(squared, rel=1e-9)
        for column, k in ((0, 0), (CUTS.index(4), 4)):
            tail = old.argsort(descending=True)[k:]
            mass = old[tail].exp().sum()
            chance = old[tail].exp() / mass
            value = mass * f[tail]
            gradient = value[:, None] * score_VV[tail]
            variance = chance @ value.square() - (chance @ value) ** 2
            spread = chance @ gradient.square().sum(1) - (chance @ gradient).square().sum()
            assert float(found["noise"][row, column]) == pytest.approx(float(variance))
            assert float(found["gradient_noise"][row, column]) == pytest.approx(float(spread))


def test_top_k_is_off_by_what_autograd_says():
    """Loss and gradient of both kinds of top-k, by the explicit losses over whole distributions."""
    given = three(4)
    columns = pair_columns(given)
    for row, (cut, k) in itertools.product(range(4), enumerate(CUTS)):
        if k == 0:
            continue
        old, teacher = given.old_TV[row], given.teacher_TV[row]
        logits = given.now_TV[row].clone().requires_grad_()
        now = logits.log_softmax(-1)
        inside = old.topk(k).indices
        whole = (now.exp() * (now - teacher)).sum()
        p, q = now[inside].log_softmax(-1), teacher[inside].log_softmax(-1)
        within = (p.exp() * (p - q)).sum()
        # the learner's surrogate: gradient in rho alone
        gap = (now - teacher).detach()
        left = ((now[inside] - old[inside]).exp() * old[inside].exp() * gap[inside]).sum()
        full, *parts = (
            torch.autograd.grad(loss, logits, retain_graph=True)[0]
            for loss in (whole, left, within)
        )
        for name, loss, gradient in zip(
            ("left", "renormalised"), (left, within), parts, strict=True
        ):
            bias = float((loss - whole).detach())
            assert columns[f"bias_{name}"][row, cut] == pytest.approx(bias, abs=1e-10)
            squared = float((gradient - full).square().sum())
            found = float(columns[f"gradient_bias_{name}"][row, cut])
            assert found == pytest.approx(squared, rel=1e-6, abs=1e-12)


def test_variances_are_those_of_the_enumeration():
    whole = three(7)
    found, sums = prefixes((7,)), whole.enumerated()
    for split in (*MONTE_CARLO, Split(4, 12), Split(16, 48), Split(8, 64, thin=True)):
        for gradient, expected in ((False, sums.variance), (True, sums.gradient_variance)):
            np.testing.assert_allclose(
                found.variance("4", split, gradient=gradient), expected(split), rtol=1e-12
            )
    assert found.ratio("4", Split(0, 16)) == pytest.approx(1 / 16)


@pytest.mark.parametrize("split", [Split(0, 64), Split(4, 12), Split(16, 48), Split(8, 64, True)])
def test_expected_ids_are_those_of_the_whole_sum(split: Split):
    flat = (0.2 * normal(3, 3, 20_000)).log_softmax(-1)
    peaked = (3 * normal(4, 3, 20_000)).log_softmax(-1)
    old = torch.cat([flat, peaked])
    sums = Enumerated(old, old, old, most_atoms=64)
    found = Sizes(sums.old_TV).cached_ids(split, sums.mass_TK[:, split.atoms], sums.draws(split))
    bounded("prefixes study, ids", float((found / sums.cached_ids(split) - 1).abs().max()), 1e-8)
    # without the powers of the small shares it must be wrong
    headless = Sizes(sums.old_TV)
    headless._powers = [torch.zeros(6, dtype=torch.float64)] * 5
    short = headless.cached_ids(split, sums.mass_TK[:, split.atoms], sums.draws(split))
    assert float((short / sums.cached_ids(split) - 1).abs().max()) > 1e-3


def test_expected_ids_are_those_that_servers_cache():
    """And top-k's are k and the path, where it is none of them."""
    given = three(1, seed=5)
    sums = given.enumerated()
    generator, caches = torch.Generator().manual_seed(0), 1000
    for split in (Split(0, 16), Split(4, 12), Split(4, 64, thin=True)):
        drawn = sound(given.rows(0, 1), caches, split, generator)
        counts = torch.bincount(drawn.row_N, minlength=caches).double()
        sizes = Sizes(sums.old_TV)
        mass, draws = sums.mass_TK[:, split.atoms], sums.draws(split)
        error = abs(float(counts.mean()) - float(sizes.cached_ids(split, mass, draws)))
        assert error < 4 * float(counts.std()) / math.sqrt(caches)
    top = Sizes(sums.old_TV).cached_ids(Split(8, 0), sums.mass_TK[:, 8], torch.zeros(1))
    assert float(top) == pytest.approx(8 + float(sums.mass_TK[0, 8]))


@pytest.mark.parametrize("split", [Split(0, 16), Split(4, 12)])
def test_wire_bytes_are_those_of_the_encoded_arrays(split: Split):
    rows = 50
    drawn = draw_caches(
        (3 * normal(6, rows, 40_000)).float(), split, torch.Generator().manual_seed(0)
    )
    logp, weights = drawn.sampler_logp_N.numpy(), drawn.weight_N.numpy()
    ids, counts = drawn.ids_N.numpy(), np.bincount(drawn.row_N.numpy(), minlength=rows)
    path_logp = logp[drawn.path_T.numpy()]
    place = np.zeros(rows, dtype=np.int64)
    row = [pack(counts), pack(ids)]
    sent = [
        *(*row, pack(place), pack(path_logp), pack_logp(logp), pack_weights(weights, split.draws)),
        *row,
        pack_logp(logp),  # the teacher's
        *(*row, pack(place), pack(path_logp), pack_logp(logp), pack_logp(logp)),
        narrow_weights(weights, split.draws),
    ]
    headers = HEADER_BYTES * len(sent) + 4 * 4  # and the scale of each array of log-probs
    headers += 4 if split.atoms else 0
    expected = wire_bytes(split, len(ids) / rows)
    assert (sum(map(len, sent)) - headers) / rows == pytest.approx(expected)


def test_the_fourth_moment_is_that_of_drawn_losses():
    given = three(1, seed=7)
    sums = given.enumerated()
    for split in (Split(0, 3), Split(4, 2)):
        loss = drawn_module.losses(
            given, split, 4000, torch.Generator().manual_seed(1), drawn_module.sound
        )
        fourth = (loss - float(sums.value_T)).pow(4)
        error = float(fourth.std()) / math.sqrt(len(fourth))
        assert abs(float(fourth.mean()) - float(fourth_moment(given, sums, split))) < 4 * error


def test_sound_caches_agree_and_wrong_ones_do_not():
    given = three(6, seed=8)
    narrow = Three(given.old_TV.float(), given.now_TV.float(), given.teacher_TV.float())
    for split in (Split(0, 1), Split(0, 16), Split(4, 4), Split(4, 64, thin=True)):
        found = compare(narrow, split, 400, torch.Generator().manual_seed(2))
        assert found["agrees"], found
    for maker, split in WRONG.values():
        found = compare(narrow, split, 400, torch.Generator().manual_seed(2), maker)
        assert not found["agrees"], found


def test_concentration_counts_the_heaviest():
    found = concentration(np.array([0.0] * 98 + [1.0, 99.0]))
    assert found["share_of_heaviest_1pct"] == pytest.approx(0.99)
    assert found["prefixes_that_hold_90pct"] == pytest.approx(0.01)
    assert concentration(np.ones(100))["prefixes_that_hold_half"] == pytest.approx(0.5)


def test_choices_are_the_best_by_trying_all():
    given = prefixes()
    for entry in choice.choices(given)["wire_bytes"]["at_equal_bytes"]:
        budget = entry["bytes"] * 1.0001
        monte_carlo = choice.KINDS["monte_carlo"]
        base = next(split for split in monte_carlo if name_of(split) == entry["bytes_of"])
        for best in entry["best"]:
            gradient, age = best["of"] == "gradient", str(best["staleness_updates"])
            for kind, splits in (("fixed", FIXED), ("thin", THIN)):
                tried = [
                    given.variance(age, split, gradient=gradient).mean()
                    for split in splits
                    if wire_bytes(split, given.ids(split)) <= budget
                ]
                assert (best[kind] is None) == (not tried)
                if tried:
                    share = min(tried) / given.variance(age, base, gradient=gradient).mean()
                    assert best[kind]["of_monte_carlo"] == pytest.approx(share, rel=1e-3)


def test_the_report_holds_every_support_and_bin():
    whole = prefixes()
    found = report(whole, truncated(whole))
    assert found["responses"] == 2
    assert sum(found["entropy"]["prefixes"]) == found["prefixes"] == 12
    assert set(found["sizes"]) < set(SUPPORTS)
    fresh, stale = found["pairs"]
    assert fresh["kl_to_old_student_nats"] == pytest.approx(0)
    assert stale["kl_to_old_student_nats"] > 0.01
    assert set(stale["r"]) == {name_of(split) for split in REPORTED}
    assert stale["r_seq"]["mc_64"]["fixed_paths"] == pytest.approx(1 / 64, rel=1e-3)
    assert stale["r_seq"]["mc_64"]["varying_paths"] > 1 / 64
    cut = found["truncated"]["pairs"]
    assert cut[0]["bias_nats"] == pytest.approx(0)
    assert cut[0]["r"] == fresh["r"]  # nothing to cut
    assert cut[1]["of_untruncated"] < 1
    assert sum(part["variance_share"] for part in stale["bins"]) == pytest.approx(1, rel=1e-3)


def test_rows_are_kept_and_made_anew_when_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []

    class Models:
        ages = ("0", "4")

        def hashes(self, age: str) -> list[str]:
            return [age]

        def logits(self, walk: Walk, names: set[str]) -> dict[str, torch.Tensor]:
            made.append(walk.name)
            given = three(len(walk.response))
            found = {"0": given.old_TV, "4": given.now_TV, "teacher": given.teacher_TV}
            return {name: found[name] for name in names}

    walks = [Walk(f"response-{n}", [1], [2, 3]) for n in range(2)]
    monkeypatch.setattr(study, "fingerprint_of", lambda asked, _: repr(asked))

    def run(shared: list[str], seconds: float) -> int:
        made.clear()
        models: Any = Models()
        budget = study.Budget(seconds)
        return len(study.response_rows(tmp_path / "rows.jsonl", walks, models, shared, budget))

    assert (run(["a"], 0.0), made) == (0, [])
    assert (run(["a"], 60.0), len(made)) == (10, 2)
    assert (run(["a"], 0.0), made) == (10, [])
    assert (run(["b"], 60.0), len(made)) == (10, 2)


def test_the_verdict_needs_agreement_and_a_control_that_fails():
    def row(sound: bool, wrong: bool) -> dict[str, object]:
        return {"sound": {"mc_1": {"agrees": sound}}, "wrong": {"sharpened": {"agrees": wrong}}}

    ages = ["1", "16"]
    good = {age: row(True, False) for age in ages}
    assert not study.verdict(good, ages)["failed"]
    assert study.verdict({"1": row(True, False)}, ages)["failed"]
    assert study.verdict(good | {"1": row(False, False)}, ages)["failed"]
    assert study.verdict(good | {"1": row(True, True)}, ages)["failed"]


def test_the_run_that_makes_the_students_is_a_valid_configuration():
    for words, updates in zip(commands(Path("somewhere")), (1, max(STALENESSES)), strict=True):
        settings = [pair for key, pair in itertools.pairwise(words) if key == "--set"]
        config = load_config(Config, ROOT / words[1], settings)
        assert config.run.max_steps == updates
        assert config.run.dir == Path("somewhere/run")
        assert all(n % config.checkpoint.every == 0 for n in STALENESSES if 1 < n <= updates)
