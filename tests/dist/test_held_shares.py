"""A served learner whose samples data workers hold: all ranks make an update, or none does."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.batching.shares import Share, shares
from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.config.schema import Config
from megatron_opd.data_workers.data_client import TRIES
from megatron_opd.records.types import Batch, HeldSample
from megatron_opd.run import batch_learner
from megatron_opd.run.batch_learner import BatchLearner
from megatron_opd.transport.messages import UpdateMetrics
from megatron_opd.transport.remote_learner import RemoteLearner
from sglang_bridge.protocol import WeightPiece
from tests.dist.caches import make_batch, oracle_update
from tests.dist.serving import START_S, arrived, make_config, served
from tests.support.held_batch import HeldBatch, held_batch
from tests.support.models import tiny_qwen3

pytestmark = pytest.mark.dist

SILENT_S = 3.0
IN_A_SAMPLE = 600
"""So many bytes of a connection are its handshake and the beginning of a sample."""
UPDATE = {"lr": 1e-3, "eps": 1e-3, "clip": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "dense", seed=11)


@pytest.fixture(scope="module")
def batch(model: Path) -> Batch:
    return make_batch(model, samples=6, seed=1, vocab=512)


class Ranks:
    """The ranks' side of a run: what they answer, and which weights they have."""

    def __init__(self, config: Config, remote: RemoteLearner, held: HeldBatch) -> None:
        self.remote, self.held = remote, held
        self.learner = BatchLearner(config, remote, held.pool)
        self.config = config
        self.answers: list[UpdateMetrics | None] = []
        train_held = remote.train_held

        async def noted(*arguments: Any) -> UpdateMetrics | None:
            self.answers.append(await train_held(*arguments))
            return self.answers[-1]

        remote.train_held = noted

    def shares(self) -> list[Share]:
        """The shares of the batch as it is held now."""
        config = self.config
        return shares(self.held.batch(), config.learner, config.estimator, 1)

    async def ask(self) -> UpdateMetrics | None:
        """Ask the ranks once for an update."""
        found = {
            sample.rollout.prompt.uid: self.held.pool.source(sample)
            for sample in self.held.batch().samples
            if isinstance(sample, HeldSample)
        }
        return await self.remote.train_held(self.shares(), found)

    async def train(self) -> UpdateMetrics:
        """Make an update as a run does."""
        return await self.learner.train(self.held.batch())

    async def weights(self) -> list[str]:
        """Digests of some of the weights, which an update changes."""
        names = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight")
        pieces = [WeightPiece(0, name, 0, 0, 64, "float32", "") for name in names]
        return await self.remote.piece_digests(pieces)


Body = Callable[[Ranks], Awaitable[None]]


def with_ranks(config: Config, batch: Batch, out: Path, ranks: int, body: Body) -> list[int | None]:
    """Run `body` beside a learner and two data workers; exit codes of its ranks."""

    async def connected(remote: RemoteLearner) -> None:
        await remote.wait_ready(START_S)
        async with held_batch(batch) as held:
            await body(Ranks(config, remote, held))

    return asyncio.run(served(config, out, connected, ranks, silent_s=SILENT_S))


async def spread(ranks: Ranks) -> None:
    """Let every share have a sample of each worker, and one of the controller."""
    for share in ranks.shares():
        for place, each in enumerate(share.sequences):
            if place < 2:
                await ranks.held.hold(each.sample.rollout.prompt.uid, place)
    for share in ranks.shares():
        samples = [each.sample for each in share.sequences]
        workers = {s.rollout.worker for s in samples if isinstance(s, HeldSample)}
        assert workers == {"data worker 0", "data worker 1"}
        assert len(samples) == 3


def held_by(share: Share, worker: int) -> int:
    """The prompt of a share's sample that a worker holds."""
    name = f"data worker {worker}"
    return next(
        s.rollout.prompt.uid
        for s in (each.sample for each in share.sequences)
        if isinstance(s, HeldSample) and s.rollout.worker == name
    )


def test_two_model_copies_make_every_update_together_or_not_at_all(
    model: Path, batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_learner, "ASK_AGAIN_S", 0.05)
    exact = oracle_update(model, arrived(batch), **UPDATE)

    async def body(ranks: Ranks) -> None:
        held = ranks.held
        first = await ranks.weights()
        await spread(ranks)
        # one head lacks a sample, the other has all of its own
        for lacking, worker in ((0, 1), (1, 0)):
            uid = held_by(ranks.shares()[lacking], worker)
            frames = held.servers[worker].held.pop(f"r-{uid}")
            assert await ranks.ask() is None
            held.servers[worker].held[f"r-{uid}"] = frames
        # one worker says nothing
        serving = held.servers[1].data_server._router
        held.servers[1].task.cancel()
        assert await ranks.ask() is None
        assert not serving.closed, "the worker is there"
        held.servers[1].task = asyncio.create_task(held.servers[1].data_server.serve())
        assert await ranks.weights() == first, "an update was made, or a part of one"
        # a healthy worker's connection breaks twice
        held.proxies[0].cuts, held.proxies[0].after = 2, IN_A_SAMPLE
        held.proxies[0].cut()
        ranks.answers.clear()
        figures = await ranks.train()
        assert figures.loss == pytest.approx(exact.loss, rel=1e-5)
        assert figures.grad_norm == pytest.approx(exact.grad_norm, rel=1e-4)
        assert len(ranks.answers) == 1
        assert held.proxies[0].cuts == 0
        second = await ranks.weights()
        assert all(a != b for a, b in zip(first, second, strict=True))
        # so often that at least one does: the ranks are asked again
        held.proxies[1].cuts, held.proxies[1].after = 2 * TRIES - 1, IN_A_SAMPLE
        held.proxies[1].cut()
        ranks.answers.clear()
        await ranks.train()
        assert ranks.answers[0] is None
        assert ranks.answers[-1] is not None
        third = await ranks.weights()
        assert third != second
        # a worker dies while both heads fetch
        await dies(ranks, 1)
        assert await ranks.weights() == third
        # what it held is sampled anew, by the other one
        for share in ranks.shares():
            await held.hold(held_by(share, 1), 0)
        await ranks.train()
        assert await ranks.weights() != third

    assert with_ranks(make_config(model, dp=2), batch, tmp_path, 2, body) == [0, 0]


async def dies(ranks: Ranks, worker: int) -> None:
    """Let a worker die as it gives its first sample; the update ends as one that was lost."""
    server, asked = ranks.held.servers[worker], asyncio.Event()

    def last_words(key: str) -> list[bytes]:
        asked.set()
        raise RuntimeError("the worker's process ends")

    server.data_server._frames = last_words
    training = asyncio.ensure_future(ranks.train())
    await asked.wait()
    await ranks.held.end(worker)
    with pytest.raises(SamplesLost, match="a data worker"):
        await training


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_all_ranks_of_a_model_copy_agree(layout: str, model: Path, batch: Batch, tmp_path: Path):
    exact = oracle_update(model, arrived(batch), **UPDATE)

    async def body(ranks: Ranks) -> None:
        first = await ranks.weights()
        await ranks.held.hold(0, 0)
        await ranks.held.hold(4, 1)
        frames = ranks.held.servers[1].held.pop("r-4")
        assert await ranks.ask() is None
        assert await ranks.weights() == first
        ranks.held.servers[1].held["r-4"] = frames
        assert (await ranks.train()).loss == pytest.approx(exact.loss, rel=1e-5)
        assert await ranks.weights() != first

    assert with_ranks(make_config(model, **{layout: 2}), batch, tmp_path, 2, body) == [0, 0]
