"""What a run that can be repeated asks of a learner's libraries."""

import os

import pytest
import torch

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner import serve
from megatron_opd.records.seeds import EVALUATION, ROLLOUT, derived_seed


def test_a_cpu_needs_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = LearnerConfig()
    assert serve.deterministic(config) is config


def test_a_gpu_is_told_and_the_users_environment_stands(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    for name in serve.DETERMINISTIC:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    config = LearnerConfig.model_validate({"megatron": {"moe_aux_loss_coeff": 0.1}})
    changed = serve.deterministic(config)
    assert changed.megatron == {"moe_aux_loss_coeff": 0.1, "deterministic_mode": True}
    assert config.megatron == {"moe_aux_loss_coeff": 0.1}
    assert asked == [True]
    assert os.environ["NCCL_ALGO"] == "Tree"
    assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    monkeypatch.undo()
    for name in serve.DETERMINISTIC:
        os.environ.pop(name, None)


def test_seeds_are_fixed_and_their_own():
    """The values are part of what a run is: another derivation would change every repeated run."""
    assert derived_seed(7, ROLLOUT, 0) == 1350103733904681301
    kinds = (ROLLOUT, EVALUATION)
    seeds = [derived_seed(s, k, *i) for s in range(3) for k in kinds for i in ((0,), (1,), (0, 1))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
