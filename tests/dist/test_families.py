"""Every kind of layer at every layout: transformers' logits, and its tensors back bit for bit.

Every family: `python -m checks students`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.to_hf import megatron_to_hf
from megatron_opd.checkpoint.to_megatron import hf_to_megatron
from megatron_opd.config.learner import ParallelConfig
from tests.dist import family_jobs, jobs, state_jobs
from tests.dist.caches import make_batch
from tests.dist.worlds import run_world
from tests.support.delta_models import published_qwen3_5_moe, tiny_qwen3_5
from tests.support.figures import bounded, relative
from tests.support.latent_models import (
    tiny_deepseek_v2,
    tiny_deepseek_v3,
)
from tests.support.models import (
    LLAMA3_ROPE,
    YARN_FACTOR,
    YARN_ROPE,
    tiny_gemma3,
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_llama,
    tiny_minimax_m2,
    tiny_mixtral,
    tiny_olmo3,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen2_moe,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_smollm3,
)

pytestmark = pytest.mark.dist

ODD = {"vocab_size": 301}  # no multiple of any layout's ranks: the vocabulary is padded
TIED = {"tie_word_embeddings": True}
ONE_KEY = {"num_key_value_heads": 1}  # two tensor-parallel ranks share it
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
MAKERS: dict[str, Any] = {
    "qwen2": (tiny_qwen2, {}),
    "qwen2 tied, padded": (tiny_qwen2, ODD | TIED | ONE_KEY),
    "qwen3, yarn, biased": (
        tiny_qwen3,
        {"rope_parameters": YARN_ROPE | {"attn_factor": 0.8}, "attention_bias": True},
    ),
    "llama 3": (tiny_llama, ODD),
    "llama, linear": (tiny_llama, LINEAR),
    "mixtral": (tiny_mixtral, ODD),
    "olmo 3": (tiny_olmo3, ODD),
    "gemma 3": (tiny_gemma3, ODD | ONE_KEY),
    "phi 4": (tiny_phi3, ODD | {"sliding_window": 97}),
    "glm 4.5": (tiny_glm4_moe, ODD | {"num_hidden_layers": 4}),
    "gpt-oss": (tiny_gpt_oss, ODD),
    "minimax m2": (tiny_minimax_m2, ODD | ONE_KEY),
    "deepseek v2": (tiny_deepseek_v2, ODD | {"num_hidden_layers": 2}),
    "deepseek v3": (tiny_deepseek_v3, ODD | {"num_hidden_layers": 2}),
    "qwen2 moe": (tiny_qwen2_moe, ODD | {"mlp_only_layers": [0]}),
    "qwen3 moe, yarn": (
        tiny_qwen3_moe,
        ODD | {"mlp_only_layers": [0], "rope_parameters": YARN_ROPE},
    ),
    "qwen3.5": (tiny_qwen3_5, ODD),
    "qwen3.5 moe": (published_qwen3_5_moe, {}),
    "qwen3.5 tied": (tiny_qwen3_5, TIED | ONE_KEY),
    "smollm3": (tiny_smollm3, ODD | TIED),
    "four layers": (tiny_qwen3_moe, TIED | {"mlp_only_layers": [1], "num_hidden_layers": 4}),
}
# attn_factor, as SGLang applies it, in transformers' words
MEANT: dict[str, Any] = {
    "qwen3, yarn, biased": {"rope_parameters": YARN_ROPE | {"attention_factor": 0.8 * YARN_FACTOR}}
}
SPARSE = (
    "mixtral",
    "glm 4.5",
    "gpt-oss",
    "minimax m2",
    "deepseek v3",
    "qwen2 moe",
    "qwen3 moe, yarn",
    "qwen3.5 moe",
)
CONVERTED = (ParallelConfig(), ParallelConfig(tp=2, pp=2))  # cut for one layout, loaded at all
SHARED = tuple(name for name in MAKERS if name != "gpt-oss")
"""Models of which ranks may share an expert, as they do in an expert-parallel group of one."""
LAYOUTS: dict[str, tuple[int, dict[str, int], tuple[str, ...]]] = {
    "tp1": (1, {}, tuple(MAKERS)),
    "pp2vpp2": (2, {"pp": 2, "vpp": 2}, ("four layers",)),
    "tp2": (2, {"tp": 2}, SHARED),
    "tp2etp1": (2, {"tp": 2, "etp": 1}, ("gpt-oss",)),
    "pp2": (2, {"pp": 2}, tuple(MAKERS)),
    "ep2": (2, {"dp": 2, "ep": 2}, SPARSE),
    "tp2ep2": (4, {"tp": 2, "dp": 2, "ep": 2}, SPARSE),
}


def reference_logits(path: Path, **overrides: object) -> torch.Tensor:
    """[S, V] of the segments of LENGTHS, each run alone through transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **overrides)
    return family_jobs.logits_alone(model)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    found = {}
    for seed, (name, (maker, overrides)) in enumerate(MAKERS.items()):
        # Logits of standard deviation 1: the bound is absolute.
        found[name] = maker(base / str(seed), seed=seed, head_std=1.0, **overrides)
        family_jobs.write_expected(
            found[name], reference_logits(found[name], **MEANT.get(name, {}))
        )
        etp = None if name in SHARED else 1
        for index, parallel in enumerate(CONVERTED):
            hf_to_megatron(
                found[name],
                found[name] / f"megatron{index}",
                parallel=parallel.model_copy(update={"etp": etp}),
                dtype=None,
                crew=Crew(),
                unit_bytes=100_000,
            )
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers_and_the_round_trip_is_bitwise(
    layout: str, models: dict[str, Path], tmp_path: Path
):
    size, parallel, names = LAYOUTS[layout]
    chosen = {name: models[name] for name in names}
    gaps = run_world(family_jobs.check_families, size, tmp_path, models=chosen, parallel=parallel)
    assert gaps.keys() == chosen.keys()
    for name, gap in gaps.items():
        bounded("families against transformers: logits", gap, 2e-5, f"{name}, {layout}")


def test_the_bound_sees_rotary_scaling(models: dict[str, Path]):
    plain = reference_logits(
        models["llama 3"], rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    )
    assert LLAMA3_ROPE["original_max_position_embeddings"] < family_jobs.LENGTHS[0]
    assert (plain - reference_logits(models["llama 3"])).abs().max() > 1e-2


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}])
def test_a_cut_vocabulary_has_the_softmax_of_its_ids(
    parallel: dict[str, int], models: dict[str, Path], tmp_path: Path
):
    """As the sampler has it: ids beyond those of a teacher with fewer rows are none.

    Of two ranks with 151 rows each, the last one then has 139 ids, or none.
    """
    model, size = models["qwen2 tied, padded"], parallel.get("tp", 1)
    arguments = {"model": model, "parallel": parallel, "num_ids": (290, 40)}
    gaps = run_world(family_jobs.check_cut, size, tmp_path, **arguments)
    assert all(gap < 2e-5 for both in gaps.values() for gap in both)
    assert len(gaps) == 2


@pytest.mark.parametrize("logp", ["lean", "dense"])
def test_a_padded_vocabulary_trains_as_one_without(
    logp: str, models: dict[str, Path], tmp_path: Path
):
    model = models["qwen2 tied, padded"]
    batch = make_batch(model, samples=4, seed=5, vocab=301)
    found = {}
    for name, size, parallel in (("one", 1, {}), ("tp2", 2, {"tp": 2})):
        config = {"parallel": parallel, "logp": logp, "optimizer": {"lr": 1e-3, "eps": 1e-3}}
        out = tmp_path / name
        result = run_world(jobs.update, size, out, model=model, config=config, batches=[batch])
        found[name] = result["metrics"][0], load_file(out / "after0" / "model.safetensors")
    (one, weights), (two, split) = found["one"], found["tp2"]
    for key in ("loss", "grad_norm"):
        bounded(f"padded vocabulary: {key} (relative)", relative(two[key], one[key]), 1e-5, logp)
    assert split.keys() == weights.keys()
    for name, tensor in weights.items():
        assert split[name].shape == tensor.shape
        torch.testing.assert_close(split[name], tensor, rtol=1e-4, atol=1e-6)


def test_what_megatron_saves_stacked_becomes_the_same_tensors(
    models: dict[str, Path], tmp_path: Path
):
    chosen = {
        str(i): models[name] for i, name in enumerate(("qwen2 tied, padded", "qwen3 moe, yarn"))
    }
    metadata = {"singleton_local_shards": False}
    run_world(family_jobs.saved_by_megatron, 2, tmp_path, models=chosen, metadata=metadata)
    for name, model in chosen.items():
        target = tmp_path / f"hf{name}"
        megatron_to_hf(tmp_path / name, target, dtype=None, crew=Crew(), model=model)
        source, back = (load_file(path / "model.safetensors") for path in (model, target))
        assert back.keys() == source.keys()
        assert all(torch.equal(back[key], source[key]) for key in source)


def test_a_learners_checkpoint_becomes_its_weights(models: dict[str, Path], tmp_path: Path):
    model, saved = models["qwen2 tied, padded"], tmp_path / "saved"
    result = run_world(
        state_jobs.unbroken,
        2,
        tmp_path,
        model=model,
        config={"parallel": {"tp": 2}, "optimizer": {"lr": 1e-3}},
        batches=[make_batch(model, samples=4, seed=5, vocab=301)],
        save_after=1,
        target=saved,
        in_background=False,
    )
    megatron_to_hf(saved, tmp_path / "hf", dtype=None, crew=Crew(), model=model)
    back = load_file(tmp_path / "hf" / "model.safetensors")
    assert state_jobs.digest(back) == result["saved"]
    assert state_jobs.digest(back) != state_jobs.digest(load_file(model / "model.safetensors"))
    other = shutil.copytree(model, tmp_path / "other")
    tree = json.loads((other / "config.json").read_text())
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    (other / "config.json").write_text(json.dumps(tree | heads))
    with pytest.raises(ValueError, match=r"state\.json says 4 heads .* config\.json 8 heads"):
        megatron_to_hf(saved, tmp_path / "cut", dtype=None, crew=Crew(), model=other)


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_share_a_conversion_and_a_failure(
    damaged: bool, models: dict[str, Path], tmp_path: Path
):
    model = models["mixtral"]
    result = run_world(
        family_jobs.convert, 2, tmp_path, source=model, unit_bytes=100_000, damaged=damaged
    )
    assert result["units"] == [result["units"][0]] * 2
    if damaged:
        assert all("is damaged: its checksum must be" in error for error in result["errors"])
        assert not (tmp_path / "megatron").exists()
        return
    assert result["errors"] == ["", ""]
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype=None, crew=Crew())
    source, back = (load_file(p / "model.safetensors") for p in (model, tmp_path / "hf"))
    assert state_jobs.digest(back) == state_jobs.digest(source)
