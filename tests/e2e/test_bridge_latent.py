"""Latent attention and gated delta nets: a server of two ranks samples from what it was sent.

Every family of students: `python -m checks synced`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_bridge.server.launch import ServerProcess
from tests.e2e.conftest import running, tiny_spec
from tests.e2e.ways import RANKS, every_way
from tests.support.delta_models import tiny_qwen3_5
from tests.support.figures import bounded
from tests.support.latent_models import tiny_deepseek_v3

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module", params=[tiny_deepseek_v3, tiny_qwen3_5], ids=["latent", "delta"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("model") / "model", seed=3)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    base = tmp_path_factory.mktemp("server")
    options: dict[str, Any] = {"tp": RANKS.tp, "weights_dir": str(base / "weights")}
    (base / "weights").mkdir()
    with running(tiny_spec(model, "student", **options), base / "log") as process:
        yield process


def test_every_transport_changes_what_is_sampled_from(
    server: ServerProcess, model: Path, tmp_path: Path
):
    """To other weights and back, by every way: as loaded, bit for bit."""
    found = every_way(server, model, tmp_path)
    bounded("latents and delta nets, TP2 server: scores (nats)", found.nats, 2e-5)
    assert found.moved > 0.1
    assert not any(found.by_way.values()), found.by_way
