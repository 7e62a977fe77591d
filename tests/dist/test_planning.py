"""A plan against what built learners hold: parameters, buffers, optimizer, groups, activations."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.models.spec import read_model_spec
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Batch, Prompt, Sample, VersionSpan
from megatron_opd.sizing.activations import BYTES, Shapes
from megatron_opd.sizing.exchanges import end_exchanges, layer_exchanges, step_exchanges
from megatron_opd.sizing.layout import in_flight_chunks, rank_groups, stage_layers
from megatron_opd.sizing.learner import learner_memory
from megatron_opd.sizing.recompute import kept_bytes
from megatron_opd.sizing.settings import Settings
from sglang_bridge.protocol import DrawCache
from tests.dist import planning_jobs
from tests.dist.worlds import run_world
from tests.support.figures import bounded, relative
from tests.support.latent_models import tiny_deepseek_v3
from tests.support.models import (
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_olmo3,
    tiny_qwen2_moe,
    tiny_qwen3,
    tiny_qwen3_moe,
)

pytestmark = pytest.mark.dist

MICRO_BATCHES = 4
LATENT_DENSE = {"first_k_dense_replace": 2, "num_hidden_layers": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("mixed", {"dtype": "float32"}),
    "bf16": ("mixed", {"dtype": "bfloat16"}),
    "recompute": ("mixed", {"dtype": "bfloat16", "recompute": "full"}),
    "selective": ("mixed", {"dtype": "bfloat16", "recompute": "selective"}),
    "selective experts": (
        "mixed",
        {
            "dtype": "float32",
            "recompute": "selective",
            "megatron": {"recompute_modules": ["moe"]},
        },
    ),
    "tied pp2": ("tied", {"dtype": "bfloat16", "parallel": {"pp": 2}}),
    "tp2 ep2": ("mixed", {"dtype": "bfloat16", "parallel": {"tp": 2, "dp": 2, "ep": 2}}),
    "tp2 etp2": ("mixed", {"dtype": "float32", "parallel": {"tp": 2}}),
    "uneven pp2": (
        "mixed",
        {
            "dtype": "float32",
            "parallel": {"pp": 2},
            "megatron": {"num_layers_in_first_pipeline_stage": 1},
        },
    ),
    "shared bf16": ("shared", {"dtype": "bfloat16"}),
    "shared tp2": ("shared", {"dtype": "float32", "parallel": {"tp": 2}}),
    "tp2 one key": ("one key", {"dtype": "float32", "parallel": {"tp": 2}}),
    "olmo tp2": ("olmo", {"dtype": "bfloat16", "parallel": {"tp": 2}}),
    "gemma": ("gemma", {"dtype": "float32"}),
    "gemma tp2": ("gemma", {"dtype": "bfloat16", "parallel": {"tp": 2}}),
    "gpt-oss": ("gpt-oss", {"dtype": "float32"}),
    "gpt-oss tp2 ep2": ("gpt-oss", {"dtype": "bfloat16", "parallel": {"tp": 2, "ep": 2}}),
    "cp2": ("mixed", {"dtype": "bfloat16", "parallel": {"cp": 2}}),
    "latent tp2": ("latent", {"dtype": "bfloat16", "parallel": {"tp": 2}}),
    "pp2 vpp2": ("mixed", {"dtype": "bfloat16", "parallel": {"pp": 2, "vpp": 2}}),
}


def plain_sample(uid: int) -> Sample:
    """A prompt of 57 tokens and a response of 200, one cached action a token."""
    count = 200
    ids_N = np.arange(count, dtype=np.int32) + 2
    draws = DrawCache(
        offsets_T1=np.arange(count + 1, dtype=np.int64),
        ids_N=ids_N,
        path_T=np.arange(count),
        weight_N=np.ones(count, np.float32),
        sampler_logp_N=np.full(count, -3, np.float32),
    )
    prompt = Prompt(uid, "", np.arange(57, dtype=np.int32) + 2)
    rollout = single_turn(prompt, ids_N, draws, (VersionSpan(0, 0, count),), "stop", 0.0, 1.0)
    return Sample(rollout, np.full(count, -2, np.float32))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "tied": tiny_qwen3(base / "tied", tie_word_embeddings=True),
        "mixed": tiny_qwen3_moe(base / "mixed", num_hidden_layers=4, mlp_only_layers=[1]),
        "gemma": tiny_gemma3(base / "gemma"),
        "gpt-oss": tiny_gpt_oss(base / "gpt-oss"),
        "olmo": tiny_olmo3(base / "olmo"),
        "latent": tiny_deepseek_v3(base / "latent", **LATENT_DENSE),
        "shared": tiny_qwen2_moe(base / "shared", mlp_only_layers=[1]),
        "one key": tiny_qwen3(base / "one-key", num_key_value_heads=1),
    }


@pytest.fixture(scope="module", params=sorted(CASES))
def case(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path, LearnerConfig, list[dict[str, Any]]]:
    """(name, model, configuration, figures by rank)."""
    kind, tree = CASES[request.param]
    config = LearnerConfig.model_validate(tree | {"max_tokens_per_microbatch": 1})
    samples = range(MICRO_BATCHES * config.parallel.dp)
    batch = Batch(0, 0, tuple(plain_sample(uid) for uid in samples))
    out = tmp_path_factory.mktemp("world")
    size = config.parallel.world_size
    run_world(
        planning_jobs.measure,
        size,
        out,
        model=models[kind],
        config=tree | {"max_tokens_per_microbatch": 1},
        batch=batch,
    )
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(size)]
    return request.param, models[kind], config, ranks


def test_parameters_are_those_of_the_built_model(case):
    name, model, config, ranks = case
    stages = learner_memory(read_model_spec(model), config, 1)
    for rank in ranks:
        planned = stages[rank["stage"]].parameters
        assert planned.total == rank["dense"] + rank["expert"], name
        if config.parallel.ep > 1:  # else Megatron has one buffer for both
            assert planned.expert == rank["expert"], name


def test_buffers_and_optimizer_state_are_as_large_as_planned(case):
    name, model, config, ranks = case
    stages = learner_memory(read_model_spec(model), config, 1)
    for rank in ranks:
        planned = stages[rank["stage"]]
        # Megatron pads a buffer to a multiple of lcm(ranks, 128) and a parameter's start to 64
        for kind in ("weights", "gradients"):
            real, padding = rank[kind], rank[kind] - getattr(planned, kind)
            assert padding >= 0, (name, kind)
            bounded(f"plan: {kind} bytes against Megatron's buffers", padding / real, 0.02, name)
    # a rank's share of the optimizer ends where the padded buffer is cut: compare the whole
    real = sum(rank["optimizer"] for rank in ranks)
    planned = sum(stages[rank["stage"]].optimizer for rank in ranks)
    gap = relative(planned, real)
    bounded("plan: optimizer bytes against its tensors", gap, 1e-4, name)


def test_groups_are_the_ranks_that_megatron_joins(case):
    name, _, config, ranks = case
    planned = {g.name: g.members for g in rank_groups(config.parallel, moe=True)}
    for number, rank in enumerate(ranks):
        for kind, members in rank["groups"].items():
            if len(members) == 1:
                assert kind not in planned, (name, kind)
            else:
                mine = [group for group in planned[kind] if number in group]
                assert mine == [tuple(members)], (name, kind)


def test_saved_tensors_are_those_of_the_formula(case):
    """Of Megatron's local layers. Experts are loaded unevenly: the ranks' mean is compared."""
    name, model, config, ranks = case
    spec = read_model_spec(model)
    parallel = config.parallel
    stages = stage_layers(spec, parallel, config.megatron)
    for stage, chunks in enumerate(stages):
        mine = [rank for rank in ranks if rank["stage"] == stage]
        for place, layer in enumerate(layer for chunk in chunks for layer in chunk):
            planned = 0.0
            for rank in mine:
                tokens = rank["tokens"] * parallel.tp
                shapes = Shapes(spec, parallel, tokens, BYTES[config.dtype], "local")
                planned += kept_bytes(shapes, layer, Settings.of(config))
                if spec.is_windowed(layer) or spec.family.sinks:  # local attention keeps a mask
                    planned += tokens**2 * BYTES[config.dtype]
            real = sum(r["saved_by_layer"][place] / r["passes"][place] for r in mine)
            if parallel.cp > 1:
                # the local attention gathers keys and values of the whole sequence, with a mask;
                # TransformerEngine's passes them around
                assert 0.85 * real < planned < real, name
                continue
            bounded(
                "plan: saved activations of a layer",
                relative(planned, real),
                0.05,
                (name, planned, real),
            )


def test_as_many_micro_batches_are_in_flight_as_planned(case):
    """Chunks that a stage ran before its first backward pass, of four micro-batches."""
    name, model, config, ranks = case
    stages = stage_layers(read_model_spec(model), config.parallel, config.megatron)
    for rank in ranks:
        first, begun = 0, 0
        for chunk in stages[rank["stage"]]:
            begun += rank["passes"][first]
            first += len(chunk)
        assert begun == in_flight_chunks(config.parallel, rank["stage"]), name


PASSED = {
    "tp": ("gather", "scatter"),
    "etp": ("gather", "scatter"),
    "ep": ("all-to-all",),
    "pp": ("send",),
}
"""What a plan counts of the passes; all-reduces are of norms' gradients and log-probs."""


def test_collectives_are_given_what_the_plan_counts(case):
    """Of all ranks together, over which unevenly loaded experts even out: bytes and calls."""
    name, model, config, ranks = case
    spec, parallel = read_model_spec(model), config.parallel
    shapes = Shapes(spec, parallel, ranks[0]["tokens"] * parallel.tp, BYTES[config.dtype], "local")
    passes = 2 * end_exchanges(shapes)
    for layer, backward in itertools.product(range(spec.num_layers), (False, True)):
        passes += layer_exchanges(shapes, layer, backward=backward)
    alike = len(ranks) // parallel.pp  # of a stage
    for group, kinds in PASSED.items():
        planned = [each for each in passes if each.group == group]
        counted = [
            rank["exchanged"].get(group, {}).get(kind, (0, 0)) for rank in ranks for kind in kinds
        ]
        whole = sum(each.whole for each in planned) * alike * MICRO_BATCHES
        assert sum(number for number, _ in counted) == whole, (name, group)
        calls = sum(each.calls for each in planned) * alike * MICRO_BATCHES
        assert sum(number for _, number in counted) == calls, (name, group)


def test_a_step_reduces_and_gathers_what_the_plan_counts(case):
    name, model, config, ranks = case
    stages = learner_memory(read_model_spec(model), config, 1)
    for rank in ranks:
        held = stages[rank["stage"]].parameters
        planned = step_exchanges(config, held.dense, held.expert)
        found = {
            group: kinds
            for group in ("dp x cp", "expert dp")
            if "scatter" in (kinds := rank["exchanged"].get(group, {}))
        }
        assert {each.group for each in planned} == set(found), name
        for each in planned:
            # without overlap, as on CPUs, each of the two optimizers gathers the other's too
            gathered = found[each.group]["gather"][0] / len(planned)
            real = found[each.group]["scatter"][0] + gathered
            bounded("plan: bytes reduced and gathered", relative(each.whole, real), 0.02, name)
