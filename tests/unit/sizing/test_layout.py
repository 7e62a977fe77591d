"""Groups of ranks and stages of layers, against Megatron's own."""

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.sizing.layout import expert_data_parallel, rank_groups, stage_layers
from tests.support.published import spec_of

powers = st.sampled_from([1, 2, 4])


@given(tp=powers, cp=powers, pp=powers, dp=powers, ep=powers, etp=st.sampled_from([None, 1, 2]))
def test_groups_are_megatrons(tp: int, cp: int, pp: int, dp: int, ep: int, etp: int | None):
    try:
        parallel = ParallelConfig(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp)
    except ValueError:
        return
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    edp = expert_data_parallel(parallel)
    expert = RankGenerator(tp=parallel.expert_tp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    expected = {
        "tp": dense.get_ranks("tp"),
        "cp": dense.get_ranks("cp"),
        "pp": dense.get_ranks("pp"),
        "dp x cp": dense.get_ranks("dp-cp"),
        "ep": expert.get_ranks("ep"),
        "etp": expert.get_ranks("tp"),
        "expert dp": expert.get_ranks("dp"),
    }
    found = {groups.name: groups.members for groups in rank_groups(parallel, moe=True)}
    for name, members in expected.items():
        if len(members[0]) == 1:
            assert name not in found
        else:
            assert sorted(found[name]) == sorted(map(tuple, members)), name


@given(
    layers=st.sampled_from([24, 48]),
    pp=st.sampled_from([1, 2, 4]),
    vpp=st.sampled_from([1, 2, 3]),
)
def test_every_layer_is_on_one_stage(layers: int, pp: int, vpp: int):
    if pp == 1:
        vpp = 1
    spec = spec_of("Qwen3-30B-A3B")
    parallel = ParallelConfig(pp=pp, vpp=vpp)
    held = list(chain.from_iterable(chain.from_iterable(stage_layers(spec, parallel))))
    assert sorted(held) == list(range(spec.num_layers))


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"num_layers_in_last_pipeline_stage": 22}, [24, 24, 24, 22]),
        (
            {"num_layers_in_first_pipeline_stage": 23, "num_layers_in_last_pipeline_stage": 23},
            [23, 24, 24, 23],
        ),
        (
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            [23, 24, 24, 23],
        ),
    ],
)
def test_uneven_stages(fields: dict[str, Any], sizes: list[int]):
    stages = stage_layers(spec_of("Qwen3-235B-A22B"), ParallelConfig(pp=4), fields)
    assert [sum(map(len, chunks)) for chunks in stages] == sizes
    assert [layer for chunks in stages for chunk in chunks for layer in chunk] == list(range(94))
