"""The controller's part: what it compares, asks and says when a side fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.holdings import server_holdings
from megatron_opd.weight_sync.plan import SyncSettings, plan_sync
from megatron_opd.weight_sync.quantised_pieces import CannotServe
from megatron_opd.weight_sync.reshard import CannotReshard
from megatron_opd.weight_sync.shards import (
    Shards,
    first_lost,
)
from megatron_opd.weight_sync.transport import OverlappingPart
from sglang_bridge import wire as wire_names
from sglang_bridge.errors import RankFailed, WeightSyncFailed
from sglang_bridge.weights.share import decode_share
from tests.support.config_files import minimal
from tests.support.shards_wire import LAYOUTS, URL, Wire


@pytest.fixture(scope="module")
def spec(moe: Path) -> ModelSpec:
    return read_model_spec(moe)


OPENED = ["pieces", "listen", "expect", "servers join", "learner joins"]


@pytest.fixture
def wire(moe: Path, spec: ModelSpec) -> Wire:
    settings = {"bucket_bytes": 4000, "same_host": "off"}
    return Wire(spec, minimal(student={"model": str(moe)}, weight_sync=settings))


def test_a_whole_life_of_the_transport(wire: Wire):
    async def scenario() -> Shards:
        shards = Shards(wire, wire.ask, wire.config)
        await shards.open()
        assert not shards.stages
        await shards.send(1)
        await shards.send(2)
        await shards.close()
        return shards

    shards = run_virtual(scenario())
    assert wire.log == [*OPENED, *["servers receive", "learner sends"] * 2, "leave"]
    assert shards.num_bytes == 30
    assert shards.tensors == {held.name for held in server_holdings(wire.spec, 1, 1)}
    learner = wire.config.learner
    room = SyncSettings("float32", None, 1000, 0)
    plan = plan_sync(wire.spec, learner.parallel, learner.megatron, LAYOUTS, room)
    assert list(wire.shares) == plan.shares([info.url for info in wire.infos])
    told = [decode_share(text, rank) for text, rank in zip(wire.shares, (1, 0), strict=True)]
    assert min(len(share["paused"]) for share in told) > 20
    joined = wire.joined
    assert joined is not None
    servers = (("http://a:1", 2, 2), ("http://b:2", 1, 1))
    assert (joined.servers, joined.dtype, joined.world_size) == (servers, "float32", 4)


def test_what_fits_is_staged_and_nothing_is_sent_in_the_pause(wire: Wire, moe: Path):
    settings = {"staging": True, "same_host": "off"}
    wire.config = minimal(student={"model": str(moe)}, weight_sync=settings)

    async def scenario() -> None:
        shards = Shards(wire, wire.ask, wire.config)
        await shards.open()
        assert shards.stages
        await shards.stage(1)
        await shards.send(1)

    run_virtual(scenario())
    assert wire.log == [*OPENED, "servers stage", "learner stages", "servers receive"]


@pytest.mark.parametrize(("backend", "agrees"), [("gloo", True), ("nccl", False)])
def test_all_ranks_agree_who_is_on_one_host(wire: Wire, moe: Path, backend: str, agrees: bool):
    settings = {"same_host": "auto"}
    wire.config = minimal(student={"model": str(moe)}, weight_sync=settings)
    wire.backend = backend
    shards = run_virtual(opened(wire))
    asked = [f"{wire_names.SAME_HOST_ACTION} {shards._group}"] if agrees else []
    assert wire.log == [*OPENED, *asked]
    assert wire.joined is not None
    assert (wire.joined.backend, wire.joined.same_host) == (backend, agrees)


@pytest.mark.parametrize(("same_host", "asked"), [("auto", True), ("off", False)])
def test_a_server_on_the_learners_gpu_is_served_from_there(
    wire: Wire, moe: Path, same_host: str, *, asked: bool
):
    wire.config = minimal(student={"model": str(moe)}, weight_sync={"same_host": same_host})
    gpu = wire_names.GPU
    wire.gpus = ("ab",)
    wire.server_gpus = {"http://a:1": [{gpu: "cd"}, {gpu: "ab"}], "http://b:2": [{gpu: "ab"}]}
    run_virtual(opened(wire))
    assert (wire_names.GPU_ACTION in wire.log) == asked
    assert wire.joined is not None
    assert wire.joined.near == ((-1, 0, 0) if asked else ())


def test_what_the_learner_s_ranks_could_not_do_is_told(wire: Wire):
    """Those that sent are not named; the transport can be opened again afterwards."""

    async def scenario() -> None:
        shards = await opened(wire)
        wire.failures = ("http://a:1 rank 0 did not take its weights: closed", "also this")
        with pytest.raises(WeightSyncFailed, match=r"^http://a:1 rank 0 did not .*; also this$"):
            await shards.send(1)
        wire.failures = ()
        wire.log.clear()
        names = {shards._group}
        await shards.reopen()
        await shards.send(1)
        assert len(names | {shards._group}) == 2
        assert wire.joined is not None
        assert wire.joined.group_name == shards._group

    run_virtual(scenario())
    assert wire.log == ["leave", "learner leaves", *OPENED, "servers receive", "learner sends"]


def test_a_group_that_does_not_form_is_told(wire: Wire):
    wire.failures = ("the weight group did not form: a rank is missing",)
    with pytest.raises(WeightSyncFailed, match="the weight group did not form: a rank is missing"):
        run_virtual(opened(wire))


def test_every_transport_has_a_group_of_its_own(wire: Wire):
    names = {Shards(wire, wire.ask, wire.config)._group for _ in range(20)}
    assert len(names) == 20


async def opened(wire: Wire) -> Shards:
    shards = Shards(wire, wire.ask, wire.config)
    await shards.open()
    return shards


@pytest.mark.parametrize(
    ("step", "done"),
    [("pieces", 1), ("listen", 2), ("expect", 3), ("servers join", 5), ("learner joins", 5)],
)
def test_a_failure_while_opening_goes_no_further(wire: Wire, step: str, done: int):
    wire.fails[step] = WeightSyncFailed(f"{URL} rank 1: no {step}")
    with pytest.raises(WeightSyncFailed, match=f"rank 1: no {step}"):
        run_virtual(opened(wire))
    assert wire.log == OPENED[:done]


@pytest.mark.parametrize(
    ("failing", "other"),
    [
        ("servers receive", "learner sends"),
        ("learner sends", "servers receive"),
        ("servers join", "learner joins"),
        ("learner joins", "servers join"),
    ],
)
def test_one_side_that_fails_ends_the_other_s_wait(wire: Wire, failing: str, other: str):
    """The other one hangs; nobody waits for it."""
    wire.fails[failing] = RankFailed(f"{URL} rank 0: RuntimeError: silent")
    wire.hangs.add(other)

    async def scenario() -> None:
        shards = await opened(wire)
        await shards.send(1)

    with pytest.raises(RankFailed, match="rank 0: RuntimeError: silent"):
        run_virtual(scenario())
    assert wire.cancelled == [other]


def test_of_two_failures_the_servers_is_told(wire: Wire):
    wire.fails = {
        "servers receive": RankFailed(f"{URL} rank 0: refused"),
        "learner sends": RuntimeError("a peer left"),
    }

    async def scenario() -> None:
        await (await opened(wire)).send(1)

    with pytest.raises(RankFailed, match="rank 0: refused"):
        run_virtual(scenario())


def test_a_server_that_is_cut_otherwise_is_told_nothing(wire: Wire):
    wire.infos[1] = replace(wire.infos[1], tp_size=2)
    with pytest.raises(CannotServe, match=r"^http://b:2 \(tp=2, ep=1\) rank 0: "):
        run_virtual(opened(wire))
    assert wire.log == ["pieces"]


def test_servers_of_a_model_that_is_not_the_learner_s(wire: Wire):
    wire.spec = replace(wire.spec, num_layers=3, moe_layers=(False, True, True))
    with pytest.raises((CannotServe, CannotReshard), match="should hold nothing, holds"):
        run_virtual(opened(wire))
    assert wire.log == ["pieces"]


def test_who_left_the_learner_is_asked_why(wire: Wire):
    """A server that the learner has left is not at fault; the learner knows who is."""
    wire.fails["servers receive"] = WeightSyncFailed("http://b:2 rank 0: rank 1 sent no weights")
    wire.failures = ("http://a:1 rank 0 did not take its weights: Connection closed",)

    async def scenario() -> None:
        await (await opened(wire)).send(1)

    with pytest.raises(WeightSyncFailed, match=r"^http://a:1 rank 0 did not take its weights"):
        run_virtual(scenario())
    wire.failures = ()
    with pytest.raises(WeightSyncFailed, match=r"^http://b:2 rank 0: rank 1 sent no weights"):
        run_virtual(scenario())


LEFT = wire_names.LOST_ACTION
CHAIN = "http://b:2 rank 0: http://a:1 rank 1 sent no weights: closed"


@pytest.fixture
def relaying(wire: Wire, moe: Path) -> Wire:
    """Servers of a chain, of which the last one is the first to be heard: it was left."""
    wire.config = minimal(student={"model": str(moe)}, weight_sync={"relay": True})
    wire.fails["servers receive"] = WeightSyncFailed(CHAIN)
    wire.failures = ("http://a:1 rank 0, or a server behind it, did not take its weights: closed",)
    return wire


async def sent(wire: Wire) -> None:
    failures, wire.failures = wire.failures, ()
    shards = await opened(wire)
    wire.failures = failures
    await shards.send(1)


def test_a_server_of_a_chain_that_does_not_answer_is_to_blame(relaying: Wire):
    relaying.fails[LEFT] = WeightSyncFailed(f"{URL}/weights_checker: no answer", [URL])
    said = f"^{URL}/weights_checker: no answer; {URL} rank 0, or a server behind it, did not"
    with pytest.raises(WeightSyncFailed, match=said) as told:
        run_virtual(sent(relaying))
    assert told.value.servers == {URL}
    assert relaying.log[-1] == LEFT


def test_where_all_servers_of_a_chain_answer_who_was_lost_first_is_named(
    relaying: Wire, monkeypatch: pytest.MonkeyPatch
):
    """No server is at fault: it may be the network. Of who lost a learner's rank that one knows."""
    lost = {"http://b:2": [{wire_names.PEER_LOST: "http://a:1 rank 0"}], URL: [{}]}

    async def ask_ranks(action: str, timeout_s: float | None = None) -> Any:
        assert action == LEFT
        return lost

    monkeypatch.setattr(relaying, "ask_ranks", ask_ranks)
    with pytest.raises(WeightSyncFailed, match=f"^other ranks lost {URL} rank 0; {URL} rank") as e:
        run_virtual(sent(relaying))
    assert not e.value.servers
    lost[URL] = [{wire_names.PEER_LOST: ""}]
    with pytest.raises(WeightSyncFailed, match=f"^{URL} rank 0, or a server behind it, did not"):
        run_virtual(sent(relaying))


def test_a_server_that_is_known_to_be_at_fault_is_enough(relaying: Wire):
    relaying.fails["servers receive"] = WeightSyncFailed(f"{URL} rank 0: no room", [URL])
    with pytest.raises(WeightSyncFailed, match=f"^{URL} rank 0: no room$"):
        run_virtual(sent(relaying))
    assert LEFT not in relaying.log


def test_who_is_lost_first_has_lost_nobody():
    def answers(**lost: str) -> dict[str, list[dict[str, str]]]:
        return {
            f"s{i}": [{wire_names.PEER_LOST: lost[f"s{i}"]} if f"s{i}" in lost else {}]
            for i in range(4)
        }

    assert first_lost(answers()) is None
    assert first_lost(answers(s0="s1 rank 0", s2="s1 rank 0", s3="s2 rank 0")) == "s1 rank 0"
    assert first_lost(answers(s0="", s1="s0 rank 0", s2="s1 rank 0")) is None
    assert first_lost(answers(s0="s1 rank 0", s1="s0 rank 0")) is None


def test_servers_of_a_chain_are_staged_when_the_last_one_is(relaying: Wire):
    """The learner is done long before."""
    relaying.fails, relaying.failures, relaying.polls = {}, (), 3
    settings = relaying.config.weight_sync.model_copy(update={"staging": True})
    relaying.config = relaying.config.model_copy(update={"weight_sync": settings})

    async def scenario() -> None:
        shards = await opened(relaying)
        relaying.log.clear()
        await shards.stage(1)

    run_virtual(scenario())
    polls = [wire_names.STAGED_ACTION] * 3
    assert sorted(relaying.log) == sorted(["learner stages", "servers stage", *polls])


@pytest.fixture
def overlapping(wire: Wire, moe: Path) -> Wire:
    sync = {"same_host": "off", "overlap": True, "staging": True}
    wire.config = minimal(student={"model": str(moe)}, weight_sync=sync)
    return wire


def test_the_learner_is_released_before_anything_is_received(overlapping: Wire):
    """What is staged is waited for on the servers, and nothing more is asked of the learner."""
    overlapping.polls = 3

    async def scenario() -> None:
        shards = await opened(overlapping)
        assert isinstance(shards, OverlappingPart)
        for version in (1, 2):
            overlapping.log.clear()
            await shards.start(version, lambda: overlapping.log.append("released"))
            await shards.stage(version)
            await shards.send(version)

    run_virtual(scenario())
    staged = ["servers stage", wire_names.STAGED_ACTION]
    assert overlapping.log == ["learner starts 2", "released", *staged, "servers receive"]


def test_a_learner_that_was_not_released_is_asked_why_it_left(overlapping: Wire):
    left = WeightSyncFailed("http://b:2 rank 0: rank 1 sent no weights")
    overlapping.fails["servers receive"] = left
    overlapping.failures = ("http://a:1 rank 0 did not take its weights: Connection closed",)

    async def scenario(released: Any) -> None:
        overlapping.failures = ()
        shards = await opened(overlapping)
        overlapping.failures = ("http://a:1 rank 0 did not take its weights: closed",)
        await shards.start(1, released)
        overlapping.log.clear()
        await shards.send(1)

    with pytest.raises(WeightSyncFailed, match=r"^http://a:1 rank 0 did not take its weights"):
        run_virtual(scenario(None))
    assert overlapping.log == ["servers receive", "learner finishes"]
    # one that trains would answer after its update
    with pytest.raises(WeightSyncFailed, match=r"^http://b:2 rank 0: rank 1 sent no weights"):
        run_virtual(scenario(lambda: None))
    assert overlapping.log == ["servers receive"]
    # a server that is at fault has said all
    overlapping.fails["servers receive"] = WeightSyncFailed(f"{URL} refuses", [URL])
    with pytest.raises(WeightSyncFailed, match=f"^{URL} refuses"):
        run_virtual(scenario(None))
    assert overlapping.log == ["servers receive"]


def test_what_a_released_learner_could_not_say_is_logged_with_the_next_try(
    overlapping: Wire, caplog: pytest.LogCaptureFixture
):
    async def scenario() -> None:
        shards = await opened(overlapping)
        await shards.start(1, lambda: None)
        overlapping.log.clear()
        overlapping.failures = ("http://a:1 rank 0 did not take its weights: closed",)
        with pytest.raises(WeightSyncFailed):  # these failures are also the next Join's
            await shards.reopen()

    run_virtual(scenario())
    assert overlapping.log == ["leave", "learner finishes", "learner leaves", *OPENED]
    (told,) = (entry.getMessage() for entry in caplog.records)
    assert told == f"of the last try the learner says: {overlapping.failures[0]}"
