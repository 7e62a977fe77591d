"""The controller's part: what it compares, asks and says when a side fails."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.holdings import server_holdings
from megatron_opd.weight_sync.plan import Room, ServerLayout, plan_sync, room_of
from megatron_opd.weight_sync.quantised_pieces import CannotServe
from megatron_opd.weight_sync.reshard import CannotReshard
from megatron_opd.weight_sync.shards import (
    Shards,
    common_dtype,
    first_lost,
    require_as_planned,
    server_layout,
)
from megatron_opd.weight_sync.shards_messages import (
    FinishSending,
    Join,
    Leave,
    ListenForShards,
    Listening,
    SendOutcome,
    SendShards,
    StartSending,
    decode,
    encode,
)
from megatron_opd.weight_sync.transport import OverlappingPart
from sglang_bridge import wire as wire_names
from sglang_bridge.errors import RankFailed, WeightSyncFailed
from sglang_bridge.fleet import WeightsWorld, weights_world
from sglang_bridge.protocol import ServerInfo, WeightPiece
from sglang_bridge.weights.share import decode_share
from tests.support.config_files import minimal

URL = "http://a:1"
LAYOUTS = (ServerLayout(2, 2), ServerLayout(1, 1))
REMEDY = "use weight_sync.type: broadcast for servers that are cut otherwise"


def pieces_of(spec: ModelSpec, layout: ServerLayout, dtype: str = "float32") -> list[WeightPiece]:
    """What a server of this layout says that it holds."""
    return [
        WeightPiece(rank, held.name, held.dim, held.start, held.length, dtype, "")
        for held in server_holdings(spec, layout.tp, layout.ep)
        for rank in held.ranks
    ]


@pytest.fixture(scope="module")
def spec(moe: Path) -> ModelSpec:
    return read_model_spec(moe)


def test_what_follows_from_the_layout_is_accepted(spec: ModelSpec):
    for layout in (*LAYOUTS, ServerLayout(4, 2)):  # of TP 4, ranks that hold copies of KV heads
        require_as_planned(URL, spec, layout, pieces_of(spec, layout))


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": 0}, r"should hold \[32:64\] of dimension 0, holds \[0:32\] of dimension 0"),
        ({"length": 16}, r"should hold \[32:64\] of dimension 0, holds \[32:48\] of dimension 0"),
        ({"dim": 1}, r"should hold \[32:64\] of dimension 0, holds \[32:64\] of dimension 1"),
        (None, r"should hold \[32:64\] of dimension 0, holds nothing"),
    ],
)
def test_a_piece_that_is_cut_otherwise_is_named(spec: ModelSpec, change: Any, said: str):
    """By url, rank, tensor and remedy, in one line."""
    layout = LAYOUTS[0]
    others, (mine,) = [], [p for p in pieces_of(spec, layout) if (p.rank, p.hf_name) == (1, QUERY)]
    others = [piece for piece in pieces_of(spec, layout) if piece != mine]
    found = others if change is None else [*others, replace(mine, **change)]
    message = rf"^{URL} \(tp=2, ep=2\) rank 1: {said} of {QUERY}: {REMEDY}$"
    with pytest.raises(CannotServe, match=message):
        require_as_planned(URL, spec, layout, found)


def test_a_tensor_or_a_rank_too_many_is_named(spec: ModelSpec):
    layout = LAYOUTS[0]
    pieces = pieces_of(spec, layout)
    odd = WeightPiece(0, "model.odd.weight", 0, 0, 5, "float32", "")
    with pytest.raises(
        CannotServe, match=r"rank 0: should hold nothing, holds \[0:5\] .* of model"
    ):
        require_as_planned(URL, spec, layout, [*pieces, odd])
    more = [*pieces, *(replace(piece, rank=2) for piece in pieces if piece.rank == 1)]
    with pytest.raises(CannotServe, match=r"rank 2: should hold nothing, holds"):
        require_as_planned(URL, spec, layout, more)
    with pytest.raises(CannotServe, match=r"rank 1: should hold \[.*, holds nothing of"):
        require_as_planned(URL, spec, layout, [piece for piece in pieces if piece.rank == 0])


def test_another_layout_than_the_server_says_is_named(spec: ModelSpec):
    found = pieces_of(spec, ServerLayout(2, 1))
    with pytest.raises(
        CannotServe, match=rf"^{URL} \(tp=2, ep=2\) rank [01]: .*experts.*: {REMEDY}$"
    ):
        require_as_planned(URL, spec, ServerLayout(2, 2), found)


def test_one_dtype_is_everyones():
    def of(*kinds: str) -> list[WeightPiece]:
        return [WeightPiece(0, f"t{i}", 0, 0, 1, kind, "") for i, kind in enumerate(kinds)]

    assert (
        common_dtype({URL: of("bfloat16", "bfloat16"), "http://b:2": of("bfloat16")}) == "bfloat16"
    )
    with pytest.raises(CannotServe, match=r"differ in dtype: .*t1 of http://a:1 is float32"):
        common_dtype({URL: of("bfloat16", "float32")})
    with pytest.raises(CannotServe, match=r"t0 of http://a:1 is float32, t0 of http://b:2 is floa"):
        common_dtype({URL: of("float32"), "http://b:2": of("float16")})
    with pytest.raises(CannotServe, match=r"are float8_e4m3fn, not one of \['bfloat16', 'float16'"):
        common_dtype({URL: of("float8_e4m3fn")})


def test_how_a_server_is_cut_is_what_it_says():
    assert server_layout(info(0, ServerLayout(4, 2))) == ServerLayout(4, 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"bucket_bytes": 10}, Room("float32", None, 2, 0)),
        ({"bucket_bytes": 10}, Room("bfloat16", None, 5, 0)),
        # a bucket of scales is no larger either
        ({"bucket_bytes": 10}, Room("bfloat16", "int8", 2, 0)),
        ({"bucket_bytes": 3}, Room("float32", None, 1, 0)),
        ({"staging": True}, Room("float32", None, 2**27, float("inf"))),
        ({"staging": True, "staging_bytes": 10}, Room("bfloat16", None, 2**28, 10)),
    ],
)
def test_numbers_of_a_bucket_and_bytes_of_a_shadow(settings: Any, expected: Room):
    found = room_of(minimal(weight_sync=settings).weight_sync, expected.dtype, expected.format)
    assert found == expected


def info(index: int, layout: ServerLayout) -> ServerInfo:
    url = f"http://{'ab'[index]}:{index + 1}"
    return ServerInfo(url, "", 1, 1, layout.tp, layout.ep, 0, "float32", 1, deterministic=False)


class Wire:
    """Servers and learner on one log; whoever sends waits for the other side."""

    def __init__(self, spec: ModelSpec, config: Config) -> None:
        self.spec, self.config = spec, config
        self.log: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.failures: tuple[str, ...] = ()
        self.cancelled: list[str] = []
        self.polls = 1
        self.infos = [info(i, layout) for i, layout in enumerate(LAYOUTS)]
        self.shares: Sequence[str] = ()
        self.joined: Join | None = None
        self.backend = "gloo"

    async def step(self, name: str) -> None:
        self.log.append(name)
        try:
            await asyncio.sleep(0.1)
            if name in self.hangs:
                await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if name in self.fails:
            raise self.fails[name]

    async def ask(self, request: bytes) -> bytes:
        message = decode(request)
        match message:
            case ListenForShards():
                assert message.world_size == 1 + 3
                await self.step("listen")
                return encode(Listening("127.0.0.1", 4711, self.backend))
            case Join():
                self.joined = message
                await self.step("learner joins")
            case SendShards(staged):
                await self.step("learner stages" if staged else "learner sends")
            case StartSending(version):
                await self.step(f"learner starts {version}")
                return encode(SendOutcome(()))
            case FinishSending():
                await self.step("learner finishes")
            case Leave():
                await self.step("learner leaves")
                return b""
        return encode(SendOutcome(self.failures))

    def world(self, senders: int = 1) -> WeightsWorld:
        return weights_world([layout.tp for layout in LAYOUTS], senders)

    async def weight_pieces(self) -> dict[str, list[WeightPiece]]:
        await self.step("pieces")
        held = [pieces_of(self.spec, layout) for layout in LAYOUTS]
        return dict(zip([info.url for info in self.infos], held, strict=True))

    async def expect_weights(self, shares: Sequence[str]) -> list[list[int]]:
        self.shares = shares
        await self.step("expect")
        return [[10, 30], [20]]

    async def init_weights_group(
        self, host: str, port: int, name: str, backend: str, timeout_s: Any = None, *, senders: int
    ) -> None:
        assert (host, port, backend, senders) == ("127.0.0.1", 4711, self.backend, 1)
        await self.step("servers join")

    async def stage_weights(self, group_name: str) -> None:
        await self.step("servers stage")

    async def receive_weights(self, group_name: str, timeout_s: float | None = None) -> None:
        assert timeout_s == self.config.weight_sync.try_s
        await self.step("servers receive")

    async def destroy_weights_group(self, name: str) -> None:
        await self.step("leave")

    async def ask_ranks(self, action: str, timeout_s: float | None = None) -> Any:
        await self.step(action)
        if action.startswith(wire_names.SAME_HOST_ACTION):
            return {}
        self.polls -= 1
        answer = {wire_names.PENDING: ""} if self.polls > 0 else {}
        return {info.url: [{}, answer] for info in self.infos}

    async def update_bucket(self, *_: object) -> None:
        raise AssertionError("no bucket is broadcast")


OPENED = ["pieces", "expect", "listen", "servers join", "learner joins"]


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
    room = Room("float32", None, 1000, 0)
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


@pytest.mark.parametrize(("backend", "settles"), [("gloo", True), ("nccl", False)])
def test_all_ranks_settle_who_is_on_one_host(wire: Wire, moe: Path, backend: str, settles: bool):
    settings = {"same_host": "auto"}
    wire.config = minimal(student={"model": str(moe)}, weight_sync=settings)
    wire.backend = backend
    shards = run_virtual(opened(wire))
    asked = [f"{wire_names.SAME_HOST_ACTION} {shards._group}"] if settles else []
    assert wire.log == [*OPENED, *asked]
    assert wire.joined is not None
    assert (wire.joined.backend, wire.joined.same_host) == (backend, settles)


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
    [("pieces", 1), ("expect", 2), ("listen", 3), ("servers join", 5), ("learner joins", 5)],
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
