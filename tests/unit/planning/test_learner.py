"""Plans from config.json alone: published sizes, layouts, refusals with their remedies."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from megatron_opd.config.sections import ServerConfig
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.planning import learner, servers
from megatron_opd.planning.activations import Shapes, head_bytes, layer_bytes
from megatron_opd.planning.layout import expert_data_parallel, rank_groups, stage_layers
from megatron_opd.planning.parameters import active_parameters, model_parameters
from megatron_opd.planning.settings import unread
from tests.support.paths import ROOT

MODELS = ROOT / "examples" / "cluster" / "models"
GIB = 2**30


def spec_of(name: str) -> ModelSpec:
    return read_model_spec(MODELS / name)


def config(**tree: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen3-1.7B", 1.72e9, 1.72e9),
        ("Qwen3-30B-A3B", 30.5e9, 3.3e9),
        ("Qwen3-235B-A22B", 235e9, 22e9),
    ],
)
def test_published_sizes(name: str, total: float, active: float):
    spec = spec_of(name)
    assert model_parameters(spec).total == pytest.approx(total, rel=0.01)
    assert active_parameters(spec) == pytest.approx(active, rel=0.02)  # published with two digits


FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        494_032_768,
    ),
    "Llama-3.1-8B": (
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        8_030_261_248,
    ),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_counted_exactly(name: str, tmp_path: Path):
    tree, expected = FAMILIES[name]
    shared = {"max_position_embeddings": 8192, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(tree | shared))
    assert model_parameters(read_model_spec(tmp_path)).total == expected


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


def test_stages_and_expert_ranks_add_up_to_the_model():
    spec = spec_of("Qwen3-30B-A3B")
    stages = learner.learner_memory(spec, config(parallel={"pp": 4, "dp": 8, "ep": 8}), 1)
    assert sum(stage.parameters.dense for stage in stages) == model_parameters(spec).dense
    assert sum(stage.parameters.expert for stage in stages) * 8 == model_parameters(spec).expert
    tied = spec_of("Qwen3-1.7B")
    copies = sum(
        s.parameters.total for s in learner.learner_memory(tied, config(parallel={"pp": 2}), 1)
    )
    assert copies - model_parameters(tied).total == tied.vocab_size * tied.hidden_size


def test_optimizer_is_shared_by_those_who_hold_the_same_parameters():
    spec = spec_of("Qwen3-30B-A3B")
    one = learner.learner_memory(spec, config(), 1)[0]
    assert one.optimizer == 12 * one.parameters.total
    four = learner.learner_memory(spec, config(parallel={"dp": 4, "ep": 2}), 1)[0]
    assert four.optimizer == 12 * (four.parameters.dense // 4 + four.parameters.expert // 2)
    exact = learner.learner_memory(spec, config(dtype="float32"), 1)[0]
    assert exact.optimizer == 8 * exact.parameters.total  # the weights are the main parameters


def test_activations_follow_the_published_formula_where_it_applies():
    """Without experts, tokens scale all of it; tensor parallelism divides all but the head."""
    spec = spec_of("Qwen3-1.7B")

    def of(tp: int, tokens: int) -> float:
        return layer_bytes(Shapes(spec, ParallelConfig(tp=tp), tokens, 2, "transformer_engine"), 0)

    h, f, d, heads, keys = 2048, 6144, 128, 16, 8
    by_hand = 8 * h + 8  # two norms: input and output, and a root each
    by_hand += 2 * d * (heads + 2 * keys + heads + keys + heads + heads) + 4 * (
        heads + keys + heads
    )
    by_hand += 6 * f
    assert of(1, 1) == by_hand
    assert of(1, 4096) == 4096 * of(1, 1)
    assert of(4, 4096) == of(1, 4096) / 4
    shapes = Shapes(spec, ParallelConfig(), 16384, 2, "transformer_engine")
    assert head_bytes(shapes, "dense") > 20 * head_bytes(shapes, "lean")


LARGE = {
    "parallel": {"tp": 4, "pp": 2, "dp": 8, "ep": 16},
    "recompute": True,
    "gpu_memory_gib": 79,
}


@pytest.mark.parametrize(
    ("name", "tree", "words"),
    [
        (
            "Qwen3-235B-A22B",
            LARGE,
            ["learner.gpu_memory_gib", "79", "optimizer", "learner.parallel.ep=32 would fit"],
        ),
        (
            "Qwen3-30B-A3B",
            {
                "parallel": {"tp": 2, "pp": 2, "dp": 4, "ep": 8},
                "max_tokens_per_microbatch": 18432,
                "gpu_memory_gib": 79,
            },
            ["stage 0", "activations", "learner.recompute=true would fit"],
        ),
        (
            "Qwen3-30B-A3B",
            {"parallel": {"pp": 4, "dp": 4, "ep": 4}, "recompute": True, "gpu_memory_gib": 40},
            ["learner.parallel.tp=2 (32 ranks) would fit"],
        ),
        (
            "Qwen3-235B-A22B",
            {"gpu_memory_gib": 79, "recompute": True},
            ["no single change is enough; nearest is learner.parallel.tp=2 (2 ranks)"],
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_a_remedy(name: str, tree: dict, words: list[str]):
    message = learner.refusal(spec_of(name), config(**tree), 8192)
    assert message is not None
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_the_remedy_named_does_fit():
    spec = spec_of("Qwen3-235B-A22B")
    tree = LARGE | {"parallel": LARGE["parallel"] | {"ep": 32}}
    assert learner.refusal(spec, config(**tree), 8192) is None
    assert learner.refusal(spec, config(parallel={"tp": 4}), 8192) is None  # no size is stated


def server(**fields: Any) -> ServerConfig:
    return ServerConfig(model=MODELS, gpu_memory_gib=79, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 4}, ["teacher.gpu_memory_gib", "63.2 GiB", "109", "teacher.tp=8 would fit"]),
        (
            {"tp": 8, "mem_fraction_static": 0.7},
            ["teacher.tp=16 would fit"],
        ),
        (
            {"tp": 8, "max_total_tokens": 2_000_000},
            ["teacher.max_total_tokens=", "would fit"],
        ),
    ],
)
def test_servers_that_cannot_fit(fields: dict[str, Any], words: list[str]):
    message = servers.refusal("teacher", spec_of("Qwen3-235B-A22B"), server(**fields), 40960)
    assert message is not None
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_server_shards():
    spec = spec_of("Qwen3-235B-A22B")
    whole, eighth = (servers.server_memory(spec, server(tp=tp)) for tp in (1, 8))
    assert whole.weights == 2 * model_parameters(spec).total
    # 4 key-value heads on 8 ranks: each has one, half of them twice
    assert whole.kv_token_bytes == 2 * 94 * 4 * 128 * 2
    assert eighth.kv_token_bytes == whole.kv_token_bytes // 4
    keys, router, norms = 2 * 4 * 128 * 4096, 128 * 4096, 2 * 4096 + 2 * 128
    replicated = 94 * (keys + 7 * (router + norms)) + 7 * 4096
    assert eighth.weights * 8 - whole.weights == 2 * replicated
    pool = eighth.kv_tokens
    assert pool is not None
    assert eighth.total == pytest.approx(0.8 * 79 * GIB, rel=1e-5)


def test_megatrons_own_fields_are_read_or_named():
    spec = spec_of("Qwen3-1.7B")
    plain = learner.learner_memory(spec, config(), 1)[0]
    tree = {
        "megatron": {"recompute_granularity": "full", "fp8": "e4m3"},
        "ddp": {"grad_reduce_in_fp32": False},
        "optimizer": {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bfloat16",
            "exp_avg_sq_dtype": "bfloat16",
        },
    }
    changed = config(**tree)
    found = learner.learner_memory(spec, changed, 1)[0]
    assert found.gradients == plain.gradients // 2
    assert found.optimizer == plain.optimizer // 2  # 2 + 2 + 2 bytes instead of 4 + 4 + 4
    assert found.activations < plain.activations / 10
    assert unread(changed) == ["learner.megatron.fp8"]
