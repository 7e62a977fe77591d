"""Learner worlds behind their socket: training, weight sync to a group of receivers, failures."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from megatron_opd.batching.shares import shares
from megatron_opd.checkpoint.run_lock import LOCK, RunLock
from megatron_opd.config.digests import learner_digests
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.load import dump_config
from megatron_opd.config.schema import Config
from megatron_opd.errors import LearnerError
from megatron_opd.models.spec import read_model_spec
from megatron_opd.records.types import Batch
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.weight_sync.broadcast_messages import (
    JoinGroup,
    ListBuckets,
    ListenForBroadcast,
    Request,
    SendBuckets,
    decode_address,
    decode_buckets,
    decode_failure,
    encode_request,
)
from megatron_opd.weight_sync.plan import ServerLayout
from megatron_opd.weight_sync.shards import Shards
from megatron_opd.wire.keys import RANK_VARIABLE
from sglang_bridge.lifetime import EXIT_LOST
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import BucketSpec, WeightPiece
from sglang_bridge.weights.digest import as_text, digest
from tests.dist import jobs
from tests.dist.caches import make_batch, oracle_update
from tests.dist.serving import START_S, arrived, make_config, served
from tests.dist.worlds import World
from tests.support.figures import bounded
from tests.support.models import tiny_qwen3_moe
from tests.support.receiving import ThreadFleet
from tests.support.sockets import listening
from tests.support.wire import KEYS

pytestmark = pytest.mark.dist

TIMEOUT_S = 5.0


async def ask(remote: RemoteLearner, request: Request) -> bytes:
    return await remote.move_weights(encode_request(request))


async def listen(remote: RemoteLearner, world_size: int) -> int:
    return decode_address(await ask(remote, ListenForBroadcast(world_size, TIMEOUT_S)))[1]


def join_group(world_size: int) -> JoinGroup:
    return JoinGroup(world_size, "weights", "gloo", TIMEOUT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_moe(tmp_path_factory.mktemp("model") / "moe", seed=11)


@pytest.fixture(scope="module")
def batch(model: Path) -> Batch:
    return make_batch(model, samples=4, seed=1, vocab=512)


def with_learner(
    config: Config, out: Path, body: Callable[[RemoteLearner], Awaitable[None]], ranks: int
) -> list[int | None]:
    """`served` in an event loop of its own."""
    return asyncio.run(served(config, out, body, ranks))


def receivers(
    out: Path, port: int, count: int, buckets: list[BucketSpec], *, silent: bool = False
) -> World:
    return World(
        jobs.receive_weights,
        count,
        out,
        port=port,
        name="weights",
        receivers=count,
        buckets=buckets,
        silent=silent,
    )


async def broadcast(remote: RemoteLearner, out: Path) -> list[dict[str, torch.Tensor]]:
    """What each of two engines received of the learner's weights."""
    buckets = decode_buckets(await ask(remote, ListBuckets()))
    assert len(buckets) > 2
    port = await listen(remote, 3)
    with receivers(out, port, 2, buckets) as engines:
        await ask(remote, join_group(3))
        await ask(remote, SendBuckets())
        assert await asyncio.to_thread(engines.join, 30) == [0, 0], engines.errors()
    return [load_file(out / f"received{rank}.safetensors") for rank in (1, 2)]


async def send_shards(remote: RemoteLearner, config: Config) -> ThreadFleet:
    """Servers of two layouts after they received the learner's weights."""
    spec = read_model_spec(config.student.model)
    fleet = ThreadFleet(spec, [ServerLayout(2, 2), ServerLayout(1, 1)], "float32")
    shards = Shards(fleet, remote.move_weights, config)
    await shards.open()
    await shards.send(1)
    await shards.close()
    return fleet


@pytest.mark.parametrize(
    ("transport", "parallel"),
    [("broadcast", {"tp": 2}), ("shards", {"pp": 2}), ("shards", {"dp": 2, "ep": 2})],
)
def test_train_sync_and_export(transport, parallel, model, batch, tmp_path):
    """The fleet receives exactly the weights after the update, which are those of the export."""

    async def body(remote: RemoteLearner) -> None:
        info = await remote.wait_ready(START_S)
        source = load_file(model / "model.safetensors")
        assert info.parameters == sum(tensor.numel() for tensor in source.values())
        figures = await remote.train(shares(batch, config.learner, Estimator(), 1))
        assert figures.loss == pytest.approx(exact.loss, rel=1e-5)
        engines, fleet = [], None
        if transport == "broadcast":
            engines = await broadcast(remote, tmp_path / "engines")
        else:
            fleet = await send_shards(remote, config)
        await remote.export_hf(tmp_path / "export")
        export = load_file(tmp_path / "export" / "model.safetensors")
        assert export.keys() == source.keys()
        assert not torch.equal(export["lm_head.weight"], source["lm_head.weight"])
        for received in engines:
            assert received.keys() == export.keys()
            assert all(torch.equal(received[name], export[name]) for name in export)
        for rank in () if fleet is None else fleet.ranks():
            for piece in rank.pieces:
                part = export[piece.hf_name].narrow(piece.dim, piece.start, piece.length)
                assert torch.equal(piece.view, part), piece.hf_name
        await check_digests(remote, export)

    config = make_config(model, transport, **parallel)
    exact = oracle_update(model, arrived(batch), lr=1e-3, eps=1e-3, clip=1.0)
    assert with_learner(config, tmp_path, body, 2) == [0, 0]


def test_an_update_beside_a_weight_sync_changes_nothing_that_is_sent(model, batch, tmp_path):
    """Megatron's own messages travel beside the weights; digests are of the live version."""

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(START_S)
        fleet = ThreadFleet(read_model_spec(model), [ServerLayout(2, 2)], "float32")
        shards = Shards(fleet, remote.move_weights, config)
        await shards.open()
        await remote.export_hf(tmp_path / "first")
        updates: list[asyncio.Task[Any]] = []

        def begin() -> None:
            update = remote.train(shares(batch, config.learner, Estimator(), 1))
            updates.append(asyncio.create_task(update))

        await shards.start(1, begin)
        await asyncio.wait(updates, timeout=0.5)  # under way, or done
        await shards.send(1)
        await asyncio.gather(*updates)
        await remote.export_hf(tmp_path / "second")
        first, second = (
            load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")
        )
        assert not torch.equal(first["model.norm.weight"], second["model.norm.weight"])
        for rank in fleet.ranks():
            for piece in rank.pieces:
                part = first[piece.hf_name].narrow(piece.dim, piece.start, piece.length)
                assert torch.equal(piece.view, part), piece.hf_name
        await check_digests(remote, first)
        await shards.close()

    config = make_config(model, {"type": "shards", "overlap": True}, tp=2)
    assert with_learner(config, tmp_path, body, 2) == [0, 0]


async def check_digests(remote: RemoteLearner, export: dict[str, torch.Tensor]) -> None:
    slices = [
        ("model.layers.1.mlp.experts.3.down_proj.weight", 1, 8, 16, "float32"),
        ("model.layers.0.self_attn.k_proj.weight", 0, 16, 16, "bfloat16"),
        ("model.norm.weight", 0, 0, 64, "float32"),
        ("model.layers.0.self_attn.k_proj.weight", 0, 0, 16, "float32"),
    ]
    found = await remote.piece_digests([WeightPiece(0, *piece, "") for piece in slices])
    for (name, dim, start, length, dtype), value in zip(slices, found, strict=True):
        part = export[name].narrow(dim, start, length).to(getattr(torch, dtype))
        assert value == as_text(digest(part, *((0, start) if dim else (start, 0)))), name


def test_an_engine_that_never_joins_or_never_takes_its_bucket_is_told(model, tmp_path):
    """The learner stays up, and listens for another group."""

    async def absent(remote: RemoteLearner) -> None:
        await remote.wait_ready(START_S)
        await listen(remote, 2)
        started = time.monotonic()
        failure = decode_failure(await ask(remote, join_group(2)))
        assert failure is not None
        assert failure.startswith("the weight group did not form: ")
        assert time.monotonic() - started < 12
        assert await listen(remote, 2) > 0

    async def silent(remote: RemoteLearner) -> None:
        await remote.wait_ready(START_S)
        port = await listen(remote, 2)
        with receivers(tmp_path / "engines", port, 1, [], silent=True):
            assert decode_failure(await ask(remote, join_group(2))) is None
            started = time.monotonic()
            failure = decode_failure(await ask(remote, SendBuckets()))
            assert failure is not None
            assert failure.startswith("a server did not take its weights: ")
            assert time.monotonic() - started < 12
            again = decode_failure(await ask(remote, SendBuckets()))
            assert again == "the weight group is not connected"

    async def main() -> None:  # side by side: most of it is waiting
        config = make_config(model)
        bodies = {"absent": absent, "silent": silent}
        work = [served(config, tmp_path / name, body, 1) for name, body in bodies.items()]
        assert await asyncio.gather(*work) == [[0], [0]]

    asyncio.run(main())


def test_what_the_last_stage_refuses_ends_every_rank_with_its_reason(model, batch, tmp_path):
    """The first stage, which speaks with the controller, is sent no cached ids."""
    first, *others = batch.samples
    draws = first.rollout.draws
    ids_N = np.concatenate([draws.ids_N[:-1], [9999]]).astype(np.int32)
    rollout = replace(first.rollout, draws=replace(draws, ids_N=ids_N))
    broken = replace(batch, samples=(replace(first, rollout=rollout), *others))

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(START_S)
        with pytest.raises(LearnerError, match=r"column ids_N must be in 0\.\.511, got"):
            await remote.train(shares(broken, config.learner, Estimator(), 1))

    config = make_config(model, pp=2)
    codes = with_learner(config, tmp_path, body, 2)
    assert set(codes) <= {1, EXIT_LOST}, "no rank waits for another"


@pytest.mark.parametrize("damage", ["token id", "teacher score"])
def test_a_rank_that_raises_ends_the_call_with_its_reason(damage, model, batch, tmp_path):
    """The damaged sample lies on the second data-parallel rank, which does not answer calls."""
    samples = list(batch.samples)
    if damage == "token id":
        reason, broken = (
            "column ids_S must be in 0..511",
            [
                replace(
                    s,
                    rollout=replace(
                        s.rollout,
                        sequences=(np.append(np.int32(9999), s.rollout.sequences[0][1:]),),
                    ),
                )
                for s in samples
            ],
        )
    else:
        reason, broken = (
            "NotFinite: the loss is nan",
            [replace(s, teacher_logp_N=np.full_like(s.teacher_logp_N, np.nan)) for s in samples],
        )

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(START_S)
        broken_batch = replace(batch, samples=tuple(broken))
        parts = shares(broken_batch, config.learner, Estimator(), 1)
        with pytest.raises(LearnerError, match=reason):
            await remote.train(parts)

    config = make_config(model, dp=2)
    codes = with_learner(config, tmp_path, body, 2)
    # the other one fails too, or finds the controller gone, or still waits for this one
    assert 1 in codes
    assert set(codes) <= {1, EXIT_LOST, None}


def test_a_world_of_the_wrong_size_names_the_keys(model, tmp_path):
    async def body(remote: RemoteLearner) -> None:
        with pytest.raises(LearnerError, match=r"tp \* cp \* pp \* dp must equal .* 2 and 1$"):
            await remote.wait_ready(START_S)

    assert with_learner(make_config(model, tp=2), tmp_path, body, 1) == [1]


def test_other_settings_than_the_controllers_are_named_on_both_sides(model, tmp_path):
    """Before: it trained with its own."""
    config = make_config(model)
    optimizer = config.learner.optimizer.model_copy(update={"lr": 5e-3})
    learner = config.learner.model_copy(update={"optimizer": optimizer})
    other = config.model_copy(update={"learner": learner})

    async def body(remote: RemoteLearner) -> None:
        with pytest.raises(LearnerError, match=r"other settings .*: learner\.optimizer\.lr must"):
            await remote.wait_ready(START_S)

    async def main() -> list[int | None]:
        admission = Admission(KEYS, learner_digests(other))
        return await served(config, tmp_path, body, 1, admission)

    assert asyncio.run(main()) == [2]


def test_a_learner_of_an_earlier_controller_writes_nothing(model, tmp_path):
    run_dir = tmp_path / "run"
    earlier = RunLock.take(run_dir)

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(START_S)
        await ask(remote, ListBuckets())  # it has seen that the directory is its controller's
        earlier.release()
        with RunLock.take(run_dir):
            with pytest.raises(LearnerError, match=r"NotTheHolder: .* now belongs to pid"):
                await remote.export_hf(run_dir / "checkpoints" / "final")
            assert [path.name for path in run_dir.iterdir()] == [LOCK]

    async def main() -> list[int | None]:
        admission = Admission(KEYS, claim=earlier.claim)
        return await served(make_config(model), tmp_path, body, 1, admission)

    assert asyncio.run(main()) == [1]


def test_a_learner_whose_controller_is_killed_ends(model, tmp_path):
    """With a controller in a process of its own, ended by SIGKILL. Before: after 15 s or more."""
    config = make_config(model)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    program = f"""
import asyncio
from pathlib import Path
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from tests.support.wire import KEYS
async def main():
    remote = RemoteLearner(load_config(Config, Path({str(tmp_path / "config.yaml")!r})),
                           Admission(KEYS))
    print(remote.address, flush=True)
    await remote.wait_ready({START_S})
    await remote.piece_digests([])  # until then the welcome may still be on its way
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        address = controller.stdout.readline().strip()
        out = tmp_path / "learner"
        try:
            with World(jobs.serve_controller, 1, out, config=config, address=address) as world:
                assert controller.stdout.readline() == "ready\n"
                controller.kill()
                started = time.monotonic()
                assert world.join(30) == [EXIT_LOST]
                bounded("killed controller: learner ends after (s)", time.monotonic() - started, 10)
        finally:
            controller.kill()


def torchrun_learner(config: Config, address: str, out: Path) -> subprocess.Popen[bytes]:
    (out / "config.yaml").write_text(dump_config(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}", "-m", "megatron_opd.learner"]
    command += [str(out / "config.yaml"), "--controller", address]
    with (out / "log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", RANK_VARIABLE: KEYS.ranks.text()}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def test_no_rank_outlives_torchrun(model, tmp_path):
    config = make_config(model, dp=2)

    async def main() -> None:
        remote = RemoteLearner(config, Admission(KEYS))
        torchrun = torchrun_learner(config, remote.address, tmp_path)
        ranks: list[psutil.Process] = []
        try:
            await remote.wait_ready(START_S)
            ranks = psutil.Process(torchrun.pid).children(recursive=True)
            assert len(ranks) >= 2
            ours = [door for door in listening(torchrun.pid) if door[2] != "pt_elastic"]
            assert ours, "gloo listens"
            assert {door[0] for door in ours} == {"127.0.0.1"}
            torchrun.kill()
            _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, 10)
            assert not alive
        finally:
            remote.close()
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
            torchrun.kill()
            torchrun.wait()

    asyncio.run(main())
