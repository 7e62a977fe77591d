"""What `python -m studies ratios` writes of a micro-batch, against the formula by hand."""

from typing import Any

import pytest
import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.learner.micro_batch import DistilMicro, MicroCache
from megatron_opd.losses.cache import Unscored
from studies.ratios import ratios
from studies.ratios_rank import shares

# Two responses of two tokens and one; the first token's path id was met by no draw.
LOG_RATIO = torch.tensor([3.0, 0.5, -0.2, 6.0, 0.1])
TEACHER = torch.tensor([-1.0, -2.0, -0.5, -9.0, -3.0])
SAMPLER = torch.tensor([-5.0, -1.0, -0.7, -8.0, -2.0])
WEIGHT = torch.tensor([0.0, 1.0, 63 / 64, 1 / 64, 1.0])
ROWS: Any = None
HELD = MicroCache(
    id_N=torch.tensor([7, 9, 3, 4, 5]),
    fresh_T=torch.tensor([True, False, True]),
    draws=Unscored(
        row_N=torch.tensor([0, 0, 1, 1, 2]),
        weight_N=WEIGHT,
        sampler_logp_N=SAMPLER,
        teacher_logp_N=TEACHER,
        path_T=torch.tensor([0, 2, 4]),
        sample_T=torch.tensor([0, 0, 1]),
        advantage_B=torch.zeros(2),
        group_log_q_B=torch.zeros(2),
        defensive_B=torch.zeros(2),
        reward_weight_B=torch.ones(2),
        teacher_weight_B=torch.ones(2),
        imitation_weight_B=torch.zeros(2),
        share_B=torch.ones(2),
    ),
)
MICRO = DistilMicro(ROWS, HELD)


def test_pull_is_weight_times_ratio_times_advantage_and_nothing_without_weight():
    student = SAMPLER + LOG_RATIO
    found = shares(Estimator(), MICRO.cache(student, prox_is_student=False), MICRO)
    pull = (WEIGHT * LOG_RATIO.exp() * (TEACHER - student)).abs()
    assert found["pull_unweighed"] == 0
    assert found["pull"] == pytest.approx(float(pull.sum()), rel=1e-6)
    assert (found["tokens"], found["actions"], found["unweighed"]) == (3, 4, 1)
    assert found["above"]["100.0"] == {"actions": 1, "pull": pytest.approx(float(pull[3]))}
    assert found["above"]["10.0"]["actions"] == 1, "20 = e^3 weighs nothing"
    largest = found["ratio_max"]
    assert largest["unweighed"] == pytest.approx(20.0855, rel=1e-4)
    assert largest["stale"] == largest["off_path"] == pytest.approx(403.43, rel=1e-4)
    assert largest["fresh"] == pytest.approx(float(LOG_RATIO[1].exp()))
    first = found["top"][0]
    shown = tuple(first[key] for key in ("token_id", "position", "stale", "path"))
    assert shown == (4, 1, True, False)


def test_a_runs_figures_add_up():
    row = shares(Estimator(), MICRO.cache(SAMPLER + LOG_RATIO, prox_is_student=False), MICRO)
    once, twice = ratios([row]), ratios([row, row])
    assert twice["actions"] == 2 * once["actions"]
    assert twice["above"]["10.0"]["micro_batches"] == 2
    for each in (once, twice):
        assert each["above"]["10.0"]["share_of_pull"] == pytest.approx(
            row["above"]["10.0"]["pull"] / row["pull"]
        )
    assert [action["row"] for action in twice["largest"][:2]] == [0, 1]
