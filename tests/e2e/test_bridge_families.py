"""Servers of families with parts of their own: what they hold, compute and take from a weight sync.

One for each kind of part: gated delta nets and shared experts with a gate, in files of a class with
a vision tower; routers with sigmoids and a bias, first layers without experts and a last one that
predicts further tokens; files that hold fused what servers and syncs name apart; sinks, and experts
whose rows take turns.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from checks.families import DELTA_NET_NATS
from megatron_opd.models.spec import read_model_spec
from megatron_opd.weight_sync.holdings import server_holdings
from tests.e2e.conftest import running, tiny_spec
from tests.e2e.replies import requests_of, span_error
from tests.e2e.weight_sync import (
    differing,
    load_tensors,
    perturbed_copy,
    synced,
)
from tests.support.carried_models import add_tensors, predicted_layer
from tests.support.delta_models import published_qwen3_5_moe
from tests.support.figures import bounded
from tests.support.models import tiny_glm4_moe, tiny_gpt_oss, tiny_phi3
from tests.support.oracles import load_reference

pytestmark = pytest.mark.e2e


def predicting_glm4_moe(path: Path, seed: int = 0) -> Path:
    """A checkpoint as exports of published ones are: with a layer that no text goes through."""
    tiny_glm4_moe(path, seed=seed)
    return add_tensors(path, predicted_layer(path, "model.layers.2."))


FAMILIES: dict[str, Callable[..., Path]] = {
    "qwen3.5 moe, published class": published_qwen3_5_moe,
    "glm 4.5": predicting_glm4_moe,
    "phi 4": tiny_phi3,
    "gpt-oss": tiny_gpt_oss,
}
REQUEST = requests_of(tokens=24, count=1)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_synced_server_is_one_that_loaded_the_same_weights(family: str, tmp_path: Path):
    old = FAMILIES[family](tmp_path / "old", seed=3)
    # of a published class transformers saves names that do not belong to the text's config.json
    text = old / "text" if (old / "text").is_dir() else old
    new = perturbed_copy(text, tmp_path / "new", scale=0.3, seed=5)
    with running(tiny_spec(old, "student"), tmp_path / "server.log") as server:
        before, held, given, after = asyncio.run(synced(server.spec.url, old, new, REQUEST))
    spec = read_model_spec(old)
    planned = {(h.name, h.dim, h.start, h.length) for h in server_holdings(spec, 1, 1)}
    assert {(p.hf_name, p.dim, p.start, p.length) for p in held} == planned
    assert differing(held, load_tensors(old)) == []
    assert differing(given, load_tensors(new)) == []
    for model, reply in ((old, before), (new, after)):
        error = span_error(load_reference(model), REQUEST, reply, 0, len(reply.output_ids_T))
        name, limit = "families: draws before and after shards (nats)", 1e-5
        if spec.delta_net is not None:
            name, limit = f"{name}, delta nets", DELTA_NET_NATS
        bounded(name, error, limit, family)
    other = span_error(load_reference(old), REQUEST, after, 0, len(after.output_ids_T))
    assert other > 1e-2
