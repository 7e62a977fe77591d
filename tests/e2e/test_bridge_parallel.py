"""A server of two tensor-parallel ranks that split the experts: same draws, scores, weights."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from torch import distributed

from megatron_opd.models.spec import read_model_spec
from megatron_opd.weight_sync.disk import Disk
from megatron_opd.weight_sync.disk_writer import DiskWriter
from megatron_opd.weight_sync.holdings import server_holdings
from megatron_opd.weight_sync.plan import ServerLayout
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge import wire
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError, ServerDied, ServerRefused, WeightSyncFailed
from sglang_bridge.fleet import Fleet
from sglang_bridge.http import HttpConnection
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import BucketSpec, RolloutRequest
from sglang_bridge.server.launch import ServerProcess, running_states
from sglang_bridge.weights.exchange import send
from tests.e2e.conftest import STARTUP_TIMEOUT_S, left_behind, running, tiny_spec
from tests.e2e.disk import DiskLearner, flip_the_last_bit, relabel
from tests.e2e.replies import (
    check_selection,
    expected_scores,
    gate_error,
    ragged_request,
    requests_of,
    span_error,
    wrong_rows,
)
from tests.e2e.weight_sync import (
    differing,
    join,
    load_tensors,
    perturbed_copy,
    plan_for,
    shards_of,
    sync_weights,
)
from tests.support.config_files import minimal
from tests.support.figures import bounded
from tests.support.oracles import load_reference
from tests.support.sockets import listening, open_to_others

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TOLERANCE = 1e-5
KEY = secrets.token_urlsafe(16)


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory below which the server may read weights."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def parallel_server(
    student_model: Path, tmp_path_factory: pytest.TempPathFactory, weights_dir: Path
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("logs") / "parallel.log"
    options = {"tp": 2, "ep": 2, "group_timeout_s": 4}
    options |= {"routed_experts": True, "routed_gates": True}
    options["weights_dir"] = str(weights_dir)
    with running(tiny_spec(student_model, "student", **options), log, KEY) as process:
        yield process


def client_of(server: ServerProcess, timeout_s: float, key: str | None = KEY) -> ServerClient:
    return ServerClient(server.spec.url, timeout_s=timeout_s, api_key=key)


def test_every_socket_is_bound_to_the_configured_host(parallel_server: ServerProcess):
    assert parallel_server.pid is not None
    found = listening(parallel_server.pid)
    for rank in ("sglang::scheduler_TP0", "sglang::scheduler_TP1"):  # their store and gloo's pairs
        assert any(name.startswith(rank) for _, _, name in found)
    assert parallel_server.spec.port in {port for _, port, _ in found}
    assert open_to_others(parallel_server.pid, parallel_server.spec.host) == []


@pytest.mark.parametrize("key", [None, "another key"])
def test_nothing_is_done_without_the_key(parallel_server: ServerProcess, key: str | None):
    """What samples, what stops the server and what changes its weights."""
    verbs = [
        ServerClient.info,
        ServerClient.version,
        ServerClient.pause,
        ServerClient.resume,
        ServerClient.flush_cache,
        ServerClient.begin_weight_update,
        ServerClient.weight_digests,
        lambda client: client.generate(requests_of(tokens=3, count=1)[0]),
        lambda client: client.abort("kept"),
        lambda client: client.end_weight_update(7),
        lambda client: client.init_weights_group("127.0.0.1", free_port(), 1, 3, "x", "gloo"),
        lambda client: client.update_bucket(BucketSpec(("w",), ("float32",), ((1,),)), "x"),
        ServerClient.weight_pieces,
        lambda client: client.weight_digests(staged=True),
        lambda client: client.expect_weights("[]"),
        lambda client: client.stage_weights("x"),
        lambda client: client.receive_weights("x"),
        lambda client: client.ask_ranks(f"{wire.TAKE_VERSION} 000000-version-1"),
    ]

    async def run():
        async with client_of(parallel_server, 60, key) as client:
            for verb in verbs:
                with pytest.raises(ServerRefused, match=r"HTTP 401: .*api_key_env") as caught:
                    await verb(client)
                assert caught.value.status == 401
            http = HttpConnection(parallel_server.spec.url, timeout_s=60, api_key=key)
            with pytest.raises(ServerRefused, match="HTTP 401"):  # it would sample a token
                await http.get("/health_generate")
            await http.close()
        async with client_of(parallel_server, 60) as client:
            assert (await client.info()).version == 0
            assert await client.alive()

    asyncio.run(run())


def test_only_who_has_the_key_may_be_idle(parallel_server: ServerProcess):
    def ask(path: str, key: str | None) -> bytes:
        shown = f"Authorization: Bearer {key}\r\n" if key else ""
        return f"GET {path} HTTP/1.1\r\nHost: h\r\n{shown}\r\n".encode()

    async def run() -> None:
        opened = [
            await asyncio.open_connection("127.0.0.1", parallel_server.spec.port) for _ in range(4)
        ]
        (known, tell), (probe, look), (drips, drip), (silent, _) = opened
        tell.write(ask("/model_info", KEY))
        look.write(ask("/health", None))
        drip.write(b"GET /model_info HTTP/1.1\r\nX: ")
        for reader in (known, probe):
            assert b" 200 " in await reader.readline()
        async with asyncio.timeout(60):
            for reader in (probe, drips, silent):  # what is left of an answer, then the end
                with contextlib.suppress(ConnectionError):
                    await reader.read()
        tell.write(ask("/model_info", KEY))
        async with asyncio.timeout(60):
            assert b"HTTP/1.1 200 " in await known.readuntil(b"HTTP/1.1 200 OK\r\n")
        for _, writer in opened:
            writer.close()

    asyncio.run(run())
    assert "refused by this server: a" in parallel_server.log_path.read_text()


def test_the_key_is_in_no_log_and_no_description(parallel_server: ServerProcess):
    async def description() -> object:
        http = HttpConnection(parallel_server.spec.url, timeout_s=60, api_key=KEY)
        try:
            return await http.get("/server_info")
        finally:
            await http.close()

    info = asyncio.run(description())
    assert info["api_key"] == "hidden"
    assert KEY not in str(info)
    log = parallel_server.log_path.read_text()
    assert "server_args=" in log, "SGLang writes its arguments"
    assert KEY not in log
    process = psutil.Process(parallel_server.pid)
    for each in (process, *process.children(recursive=True)):
        assert KEY not in " ".join(each.cmdline())


def test_two_ranks_draw_score_and_receive(
    parallel_server: ServerProcess, student_model: Path, tmp_path: Path
):
    changed_model = perturbed_copy(student_model, tmp_path / "changed", scale=0.1, seed=5)
    changed = load_tensors(changed_model)
    asked = requests_of(tokens=64, count=6)
    requests = [msgspec.structs.replace(request, experts=True, gates=True) for request in asked]
    scored = [ragged_request(f"p{i}", 12, 30, i, (20 + i, 9)) for i in range(4)]
    scored[0] = msgspec.structs.replace(scored[0], num_atoms=4, num_draws=8, temperature=0.7)

    async def run():
        async with Fleet([client_of(parallel_server, 120)]) as fleet:
            assert (fleet.infos[0].tp_size, fleet.infos[0].ep_size) == (2, 2)
            assert fleet.world().size == 3
            group, name = await join(fleet)
            work = [asyncio.create_task(fleet.generate(request)) for request in requests]
            await asyncio.sleep(0.3)
            await sync_weights(fleet, group, name, changed, 1)
            digests = (await fleet.weight_digests())[parallel_server.spec.url]
            replies = await asyncio.gather(*work)
            scores = await asyncio.gather(*map(fleet.score, scored))
            await fleet.destroy_weights_group(name)
            distributed.destroy_process_group(group)
        return replies, scores, digests

    replies, scores, digests = asyncio.run(run())
    planned = {
        (rank, part.name, part.dim, part.start, part.length)
        for part in server_holdings(read_model_spec(student_model), tp=2, ep=2)
        for rank in part.ranks
    }
    held = {(piece.rank, piece.hf_name, piece.dim, piece.start, piece.length) for piece in digests}
    assert held == planned, "what a plan of weight transfers takes the ranks to hold"
    models = [load_reference(student_model), load_reference(changed_model)]
    assert any(len(reply.spans) == 2 for reply in replies)
    for request, reply in zip(requests, replies, strict=True):
        for version, start, stop in reply.spans:
            error = span_error(models[version], request, reply, start, stop)
            bounded("TP2 x EP2 server: draws across a weight sync (nats)", error, TOLERANCE)
        assert wrong_rows(request, reply, dict(enumerate(models))) == 0
        gap = gate_error(models[reply.spans[-1][0]], request, reply)
        bounded("gate weights of two ranks against transformers", gap, 1e-5, request.rid)
    for request, reply in zip(scored, scores, strict=True):
        error = np.abs(reply.logp_N - expected_scores(models[1], request)).max()
        bounded("TP2 x EP2 server: scores (nats)", error, TOLERANCE)
    check_selection(models[1], scored[0], scores[0])
    assert {piece.rank for piece in digests} == {0, 1}
    assert {piece.hf_name for piece in digests} == set(changed)
    assert differing(digests, changed) == []
    covered: dict[str, set[int]] = {}
    for piece in digests:  # the ranks together hold every row
        rows = range(piece.start, piece.start + piece.length)
        covered.setdefault(piece.hf_name, set()).update(rows)
        assert max(rows) < changed[piece.hf_name].shape[piece.dim]
    dims = {piece.hf_name: piece.dim for piece in digests}
    assert all(len(rows) == changed[name].shape[dims[name]] for name, rows in covered.items())


def test_two_ranks_sample_by_seeds(parallel_server: ServerProcess):
    """The same ids for the same seed, whatever the request is called; others without one."""
    seeds = [5, 6, None, 7, None]

    async def ask() -> list[list[int]]:
        requests = [
            RolloutRequest(
                exact=True,
                rid=f"{secrets.token_hex(8)}.",
                input_ids=[7, 8, 9 + i],
                max_new_tokens=20,
                seed=seed,
            )
            for i, seed in enumerate(seeds)
        ]
        async with client_of(parallel_server, 120, KEY) as client:
            replies = await asyncio.gather(*map(client.generate, requests))
            return [reply.output_ids_T.tolist() for reply in replies]

    one, two = asyncio.run(ask()), asyncio.run(ask())
    for seed, first, second in zip(seeds, one, two, strict=True):
        assert (first == second) == (seed is not None)


def test_shards_reach_both_ranks(
    parallel_server: ServerProcess, student_model: Path, tmp_path: Path
):
    """Some tensors by way of shadow buffers, while requests run, and the others in the pause."""
    changed_model = perturbed_copy(student_model, tmp_path / "changed", scale=0.1, seed=6)
    changed = load_tensors(changed_model)
    plan = plan_for(student_model, ServerLayout(2, 2), staged=200_000)
    first, rest = (shards_of(plan, changed, staged=staged) for staged in (True, False))
    requests = requests_of(tokens=64, count=4)
    device = torch.device("cpu")

    async def run():
        async with Fleet([client_of(parallel_server, 120)]) as fleet:
            url, version = parallel_server.spec.url, fleet.infos[0].version + 1
            group, name = await join(fleet)
            pieces = (await fleet.weight_pieces())[url]
            (sizes,) = await fleet.expect_weights(plan.shares([url]))
            old = (await fleet.weight_digests())[url]
            work = [asyncio.create_task(fleet.generate(request)) for request in requests]
            await fleet.stage_weights(name)
            await asyncio.to_thread(send, group, first, device)
            staged = (await fleet.weight_digests(staged=True))[url]
            still = (await fleet.weight_digests())[url]
            await fleet.pause("retract")
            await fleet.begin_weight_update()
            await asyncio.gather(
                fleet.receive_weights(name, 60),
                asyncio.to_thread(send, group, rest, device),
            )
            await fleet.flush_cache()
            await fleet.end_weight_update(version)
            await fleet.resume()
            new = (await fleet.weight_digests())[url]
            await asyncio.gather(*work)
            reply = await fleet.generate(msgspec.structs.replace(requests[0], rid="after"))
            await fleet.destroy_weights_group(name)
            distributed.destroy_process_group(group)
        return pieces, sizes, old, staged, still, new, reply

    pieces, sizes, old, staged, still, new, reply = asyncio.run(run())
    held = [[p for p in pieces if p.rank == rank] for rank in (0, 1)]
    elements = [
        sum(changed[p.hf_name].narrow(p.dim, p.start, p.length).numel() for p in mine)
        for mine in held
    ]
    assert sizes == [4 * count for count in elements]
    assert {p.rank for p in staged} == {0, 1}
    assert 0 < len(staged) < len(pieces)
    assert differing(staged, changed) == []
    assert still == old
    assert differing(new, changed) == []
    assert len(new) == len(pieces)
    error = span_error(
        load_reference(changed_model), requests[0], reply, 0, len(reply.output_ids_T)
    )
    bounded("TP2 x EP2 server: draws after shards (nats)", error, TOLERANCE)


@pytest.mark.parametrize("staging", [True, False])
def test_versions_on_disk_reach_both_ranks(
    parallel_server: ServerProcess,
    student_model: Path,
    weights_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    staging: bool,
):
    """A whole version and a change, while requests run; then a damaged file, which is named."""
    changed_model = perturbed_copy(student_model, tmp_path / "changed", scale=0.1, seed=7 + staging)
    learner = DiskLearner(monkeypatch, student_model, load_tensors(changed_model))
    sync = {"type": "disk", "directory": str(weights_dir), "delta": True, "staging": staging}
    config = minimal(student={"model": str(student_model)}, weight_sync=sync)
    requests = requests_of(tokens=48, count=3)

    async def run():
        async with Fleet([client_of(parallel_server, 120)]) as fleet:
            await relabel(fleet, 0)
            writer = DiskWriter(learner.full, config)
            disk = Disk(fleet, learner.asks(writer), config)
            session = WeightSync(fleet, learner, disk, config.weight_sync)
            await session.open()
            work = [asyncio.create_task(fleet.generate(request)) for request in requests]
            first = await session.sync(1)
            learner.change_one_row()
            second = await session.sync(2)
            await asyncio.gather(*work)
            found = (await fleet.weight_digests())[parallel_server.spec.url]
            learner.change_one_row()
            await learner.write(disk, 3)
            flip_the_last_bit(weights_dir, 3)
            damaged = rf"{parallel_server.spec.url} rank [01]: BadVersion: .*version-3/rank00000"
            with pytest.raises(WeightSyncFailed, match=damaged):
                await disk.send(3)
            await session.sync(4)
            again = (await fleet.weight_digests())[parallel_server.spec.url]
            reply = await fleet.generate(msgspec.structs.replace(requests[0], rid="after disk"))
            await session.close()
            writer.close()
        return first, second, found, again, reply

    first, second, found, again, reply = asyncio.run(run())
    assert 0 < second.num_bytes < first.num_bytes / 3
    assert len(found) == len(again)
    assert differing(again, learner.tensors) == []
    assert list(weights_dir.glob("run-*")) == []
    assert {version for version, _, _ in reply.spans} == {4}


def test_a_silent_sender_is_an_error_not_a_hang(
    parallel_server: ServerProcess, student_model: Path
):
    """Nobody at the address, in the broadcast, or behind a shard; the server serves on.

    So it does after lists of shards that do not fill its ranks.
    """
    plan = plan_for(student_model, ServerLayout(2, 2), staged=0)
    urls = [parallel_server.spec.url]
    (share,), (layout,) = plan.shares(urls), plan.layouts
    of_rank_1 = next(route for route in layout.paused if route.destination == 1)
    paused = tuple(route for route in layout.paused if route is not of_rank_1)
    short = replace(plan, layouts=(replace(layout, paused=paused),)).shares(urls)[0]
    nothing = replace(plan, layouts=(replace(layout, paused=()),)).shares(urls)[0]
    bad = {
        short: r"rank 1: BadExpectation: .* (is not filled exactly once|cut along the dim)",
        nothing: r"rank 0: BadExpectation: .*cut along the dimensions \[\]",
        "": r"rank 0: BadShare: no list of weights: ",
        "[" * 100_000 + " ": r"rank 0: (BadShare|RecursionError)",
        share[:-40]: r"rank 0: BadShare: no list of weights: ",
    }

    async def run():
        async with Fleet([client_of(parallel_server, 60)]) as fleet:
            with pytest.raises(WeightSyncFailed, match="Failed to initialize"):
                await fleet.init_weights_group("127.0.0.1", free_port(), "nobody", "gloo", 30)
            group, name = await join(fleet)
            for shares, message in bad.items():
                with pytest.raises(WeightSyncFailed, match=f"{parallel_server.spec.url} {message}"):
                    await fleet.expect_weights([shares])
            await fleet.expect_weights(plan.shares(urls))
            with pytest.raises(
                WeightSyncFailed, match=r"rank 0: .* not joined a group named no-su"
            ):
                await fleet.receive_weights("no-such-group")
            with pytest.raises(WeightSyncFailed, match=r"rank 0: .*no staged weights are expected"):
                await fleet.stage_weights(name)
            await fleet.pause("retract")
            await fleet.begin_weight_update()
            bucket = BucketSpec(("lm_head.weight",), ("float32",), ((512, 64),))
            with pytest.raises(WeightSyncFailed, match="Failed to receive weights"):
                await fleet.update_bucket(bucket, name)
            distributed.destroy_process_group(group)
            group, name = await join(fleet)
            with pytest.raises(WeightSyncFailed, match=r"rank 0: .* sent no weights: .*imed out"):
                await fleet.receive_weights(name)
            await fleet.end_weight_update(fleet.infos[0].version + 1)
            await fleet.resume()
            distributed.destroy_process_group(group)
            return await fleet.generate(requests_of(tokens=3, count=1)[0])

    assert len(asyncio.run(run()).output_ids_T) > 0, "it may end before its third token"


def test_stop_ends_a_paused_server_with_work_queued(parallel_server: ServerProcess):
    """SIGTERM alone can leave such a server alive. Last of this module: it ends the server."""

    async def run():
        async with client_of(parallel_server, 60) as client:
            await client.pause("retract")
            task = asyncio.create_task(client.generate(requests_of(tokens=9, count=1)[0]))
            await asyncio.sleep(0.3)
            assert not task.done()
            await asyncio.to_thread(parallel_server.stop, 0.5)
            with pytest.raises(BridgeError):
                await task

    group = parallel_server.pid
    assert group is not None
    assert len(running_states(group)) >= 3
    files = left_behind(parallel_server)
    assert any("sglang_loads_" in path for path in files)
    assert any("sgl_shm_" in path for path in files)
    asyncio.run(run())
    assert running_states(group) == []
    assert [path for path in files if os.path.exists(path)] == []


def test_a_missing_model_is_told_from_the_log(tmp_path: Path):
    process = ServerProcess(tiny_spec(tmp_path / "nowhere", "teacher"), tmp_path / "log")
    process.start()
    with pytest.raises(ServerDied, match=r"during start-up(.|\n)*nowhere"):
        process.wait_ready(STARTUP_TIMEOUT_S)
    assert process.pid is not None
    assert running_states(process.pid) == []
