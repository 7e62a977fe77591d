"""Which kernels a machine gets, by what is installed."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opd.cli.tables import check
from megatron_opd.config import kernels
from megatron_opd.config.kernels import choose_kernels
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.errors import UserError
from sglang_bridge.toolkit import CACHE_VARIABLE

TE, FUSED, APEX = "transformer_engine", "fused_weight_gradient_mlp_cuda", "amp_C"


@pytest.mark.parametrize("installed", [set(), {TE}, {FUSED, APEX}, {TE, FUSED, APEX}])
@pytest.mark.parametrize("cuda", [False, True])
def test_what_is_chosen_and_why(installed, cuda, monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if name in installed else None)
    chosen = choose_kernels(cuda)
    assert chosen.engine == (cuda and TE in installed)
    assert chosen.fused_gradients == (cuda and bool({TE, FUSED} & installed))
    told = dict(chosen.reasons)
    if not cuda:
        assert "no GPU" in told["layers here"]
        return
    assert ("TransformerEngine: it is installed" in told["layers here"]) == chosen.engine
    assert ("not fused" in told["weight gradients here"]) != chosen.fused_gradients
    if chosen.fused_gradients:
        assert ("TransformerEngine" in told["weight gradients here"]) == chosen.engine
    best = "TransformerEngine" if TE in installed else "apex" if APEX in installed else "torch"
    assert told["optimizer here"].startswith(best)
    how = "how to build either: docs/install.md"
    assert (how in told["optimizer here"]) == (best == "torch")
    assert (how in told["weight gradients here"]) != chosen.fused_gradients


@pytest.mark.parametrize(("found", "fits"), [("2.14.0", False), ("2.14.1", True), ("2.20", True)])
def test_a_transformer_engine_too_old_for_megatron_is_refused(found, fits, monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if name == TE else None)
    monkeypatch.setattr(kernels, "version", lambda name: found)
    if fits:
        assert choose_kernels(True).engine
        return
    with pytest.raises(UserError, match=r"must be 2\.14\.1 or newer, got 2\.14\.0: .* install"):
        choose_kernels(True)
    assert not choose_kernels(False).engine, "which does not use it"


def test_an_apex_without_its_extensions_is_named(monkeypatch):
    """Megatron takes it wherever it can be imported, and it refuses when it is constructed."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if name == "apex" else None)
    chosen = choose_kernels(True)
    told = dict(chosen.reasons)["optimizer here"]
    assert "lacks its extension amp_C" in told
    assert "Build it with its extensions or remove it" in told
    assert not chosen.fused_gradients


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "fused (apex's fused_weight_gradient_mlp_cuda)"),
        (
            {"gradient_accumulation_fusion": False},
            "not fused, as learner.megatron.gradient_accumulation_fusion says",
        ),
    ],
)
def test_the_check_says_what_the_configuration_chose(given, words, monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if name == FUSED else None)
    monkeypatch.setattr(check, "has_gpu", lambda: True)
    learner = LearnerConfig.model_validate({"megatron": given})
    config: Any = SimpleNamespace(learner=learner, run=SimpleNamespace(deterministic=False))
    rows = dict(check.kernel_rows(config, moe=False))
    assert rows["weight gradients here"] == words
    assert rows["servers compile by"] == check.compiler_words(os.environ)


def test_the_check_says_whether_a_first_start_compiles(tmp_path: Path):
    home, cache = tmp_path / "cuda", tmp_path / "cache"
    kernel = cache / "sm90a" / "norm" / "build-1" / "deps-2" / "norm.so"
    environment = {"CUDA_HOME": str(home), CACHE_VARIABLE: str(cache)}
    assert check.compiler_words(environment) == check.NO_TOOLKIT
    for file in (home / "bin" / "nvcc", kernel):
        file.parent.mkdir(parents=True)
    (home / "bin" / "nvcc").touch()
    assert check.compiler_words(environment) == f"{home}/bin/nvcc; in {cache} {check.NOT_KEPT}"
    bare = environment | {"PATH": str(tmp_path)}
    assert check.compiler_words(bare).endswith("which needs gcc and c++ on PATH: install g++")
    kernel.touch()
    assert check.compiler_words(environment) == f"{home}/bin/nvcc; in {cache} 1 kernels are kept"
