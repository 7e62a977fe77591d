"""Which of Megatron's speed-ups are on, by layout and by what is installed."""

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_opd.config.kernels import Kernels
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.speedups import choose_speedups, overlapping


def learner(**tree: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(tree)


def kernels(engine: bool) -> Kernels:
    return Kernels(engine, engine, ())


@pytest.mark.parametrize(
    ("parallel", "cuda", "on", "why"),
    [
        ({"dp": 2}, True, True, "during the passes"),
        ({"cp": 2}, True, True, "during the passes"),
        # two ranks hold the same experts although no dense parameter is held twice
        ({"tp": 2, "ep": 1}, True, False, "no rank holds what another does"),
        ({"tp": 4, "ep": 2, "etp": 1}, True, True, "during the passes"),
        ({"tp": 2, "pp": 2}, True, False, "no rank holds what another does"),
        ({}, True, False, "no rank holds what another does"),
        ({"dp": 2}, False, False, "no GPU"),
    ],
)
def test_exchanges_overlap_where_there_are_some(
    parallel: dict[str, int], cuda: bool, on: bool, why: str
):
    config = learner(parallel=parallel)
    both = {"overlap_grad_reduce": on, "overlap_param_gather": on}
    assert overlapping(config, cuda=cuda) == both
    chosen = choose_speedups(config, kernels(cuda), cuda=cuda, moe=False)
    assert chosen.overlap == on
    ((what, told),) = chosen.reasons
    assert what == "exchanges here"
    assert why in told


def test_parameters_are_not_gathered_alone():
    config = learner(parallel={"dp": 2}, ddp={"overlap_grad_reduce": False})
    assert not overlapping(config, cuda=True)["overlap_param_gather"]
    with pytest.raises(ValidationError, match="overlap_param_gather must not be true with"):
        learner(ddp={"overlap_grad_reduce": False, "overlap_param_gather": True})


@pytest.mark.parametrize(
    ("moe", "engine", "deterministic", "on", "why"),
    [
        (True, True, False, True, "fused (TransformerEngine's"),
        (True, False, False, False, "the kernel is TransformerEngine's"),
        (True, True, True, False, "run.deterministic"),
        (False, True, False, False, None),
    ],
)
def test_tokens_are_permuted_by_one_kernel_where_it_is_there(
    moe: bool, engine: bool, deterministic: bool, on: bool, why: str | None
):
    chosen = choose_speedups(
        learner(), kernels(engine), cuda=True, moe=moe, deterministic=deterministic
    )
    assert chosen.permute == on
    told = dict(chosen.reasons).get("permutation here")
    assert told is None if why is None else told is not None and why in told


def test_what_the_configuration_says_is_named():
    config = learner(
        ddp={"overlap_grad_reduce": True, "overlap_param_gather": False},
        megatron={"moe_permute_fusion": False},
    )
    told = dict(choose_speedups(config, kernels(True), cuda=True, moe=True).reasons)
    assert told["exchanges here"] == (
        "as learner.ddp.overlap_grad_reduce and learner.ddp.overlap_param_gather say"
    )
    assert told["permutation here"] == "as learner.megatron.moe_permute_fusion says"
