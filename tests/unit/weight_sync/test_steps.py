"""One try of a weight sync, by broadcast, with fakes: order, failures, silence, digests."""

import asyncio
from dataclasses import replace

import pytest

from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.broadcast import Broadcast
from megatron_opd.weight_sync.broadcast_messages import (
    JoinGroup,
    LeaveGroup,
    ListBuckets,
    ListenForBroadcast,
    SendBuckets,
    decode_request,
    encode_address,
    encode_buckets,
    encode_failure,
)
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.errors import ServerRefused, WeightSyncFailed
from sglang_bridge.fleet import weights_world
from sglang_bridge.protocol import BucketSpec, WeightPiece
from tests.support.config_files import minimal
from tests.support.fakes import SameServers

BUCKETS = (
    BucketSpec(("embed", "norm"), ("float32", "float32"), ((10, 4), (4,))),
    BucketSpec(("lm_head.weight",), ("bfloat16",), ((10, 4),)),
)
URLS = ("http://a:1", "http://b:2")
PIECES = [
    WeightPiece(0, "embed", 0, 0, 10, "float32", "d-embed-0"),
    WeightPiece(0, "norm", 0, 0, 4, "float32", "d-norm-0"),
    WeightPiece(0, "lm_head.weight", 0, 0, 10, "bfloat16", "d-lm_head.weight-0"),
]
SETTINGS = "weight_sync.timeout_s = 30, weight_sync.tries = 1"
STEPS = ["pause", "begin", "bucket 0", "send", "flush", "end", "verify", "learner digests"]


class Wire:
    """Fleet and learner on one log; a bucket's POST and its broadcast need each other."""

    def __init__(self, *, fail=None, error=None, hang=None):
        self.log = []
        self.fail, self.error = fail, error or ServerRefused(URLS[1], "/x", 400, "no session")
        self.hang = hang
        self.versions = dict.fromkeys(URLS, 0)
        self.pieces = dict.fromkeys(URLS, PIECES)
        self.staged = dict.fromkeys(URLS, PIECES)
        self.not_abandoned = {}
        self.running = True
        self.sent = [asyncio.Event() for _ in BUCKETS]
        self.wanted = [asyncio.Event() for _ in BUCKETS]

    async def step(self, name):
        self.log.append(name)
        await asyncio.sleep(0.1)
        if name == self.hang:
            await asyncio.sleep(1e9)
        if name == self.fail:
            raise self.error

    def reset(self):
        for event in (*self.sent, *self.wanted):
            event.clear()


class FakeFleet(SameServers):
    def __init__(self, wire):
        self.wire = wire
        self.silent = ()
        self.urls = URLS

    def world(self, senders=1):
        return weights_world([2, 1], senders)

    async def versions(self):
        await self.wire.step("info")
        return self.wire.versions

    async def init_weights_group(self, host, port, name, backend, timeout_s=None):
        assert port == 2345
        await self.wire.step(f"join {name} {backend}")
        await self.wire.step("join")

    async def destroy_weights_group(self, name):
        await self.wire.step("leave")

    async def pause(self, mode="retract"):
        assert mode == "retract"
        await self.wire.step("pause")
        self.wire.running = False

    async def resume(self):
        await self.wire.step("continue")
        self.wire.running = True

    async def begin_weight_update(self):
        await self.wire.step("begin")

    async def update_bucket(self, bucket, group_name, timeout_s=None):
        index = BUCKETS.index(bucket)
        await self.wire.step(f"bucket {index}")
        self.wire.wanted[index].set()
        await self.wire.sent[index].wait()

    async def flush_cache(self):
        await self.wire.step("flush")

    async def end_weight_update(self, version):
        await self.wire.step("end")
        self.wire.versions = dict.fromkeys(URLS, version)

    async def abort_all(self):
        raise NotImplementedError

    async def abandon_weight_update(self, limit_s):
        await self.wire.step("abandon")
        return self.wire.not_abandoned

    async def weight_digests(self, *, staged=False):
        await self.wire.step("verify staged" if staged else "verify")
        return self.wire.staged if staged else self.wire.pieces


class FakeLearner:
    def __init__(self, wire):
        self.wire = wire
        self.world_size = None
        self.asked = []

    async def move_weights(self, request):
        match decode_request(request):
            case ListBuckets():
                await self.wire.step("manifest")
                return encode_buckets(BUCKETS)
            case ListenForBroadcast():
                await self.wire.step("listen")
                return encode_address(("127.0.0.1", 2345))
            case JoinGroup(world_size=size):
                self.world_size = size
                await self.wire.step("connect")
                return encode_failure(None)
            case SendBuckets():
                await self.send_buckets()
                return encode_failure(None)
            case LeaveGroup():
                await self.wire.step("learner leaves")
        return b""

    async def send_buckets(self):
        await self.wire.step("send")
        for wanted, sent in zip(self.wire.wanted, self.wire.sent, strict=True):
            # a broadcast returns only when every server takes part
            await wanted.wait()
            sent.set()

    async def piece_digests(self, pieces):
        self.asked = list(pieces)
        await self.wire.step("learner digests")
        return [f"d-{piece.hf_name}-{piece.start}" for piece in pieces]


def session(wire, **config):
    fleet, learner = FakeFleet(wire), FakeLearner(wire)
    settings = WeightSyncConfig(timeout_s=30.0, **{"tries": 1} | config)
    return weight_sync_of(fleet, learner, settings), learner


def weight_sync_of(fleet, learner, settings):
    transport = Broadcast(fleet, learner.move_weights, minimal(weight_sync=settings))
    return WeightSync(fleet, learner, transport, settings)


def test_a_weight_sync_to_no_server_says_so():
    async def scenario():
        wire = Wire()
        weight_sync, _ = session(wire)
        await weight_sync.open()
        wire.pieces = {}
        with pytest.raises(WeightSyncFailed, match=r"verify: no server is left"):
            await weight_sync.sync(1)

    run_virtual(scenario())


def test_steps_come_in_order_and_are_timed():
    async def scenario():
        wire = Wire()
        weight_sync, learner = session(wire)
        await weight_sync.open()
        assert learner.world_size == 4
        opened = len(wire.log)
        report = await weight_sync.sync(1)
        assert set(wire.log[opened + 2 : opened + 4]) == {"send", "bucket 0"}
        order = [name for name in wire.log[opened:] if name != "send"]
        started = "pause begin bucket_0 bucket_1 flush end verify learner_digests continue info"
        assert [name.replace(" ", "_") for name in order] == started.split()
        assert report.version == 1
        assert report.num_bytes == 10 * 4 * 4 + 4 * 4 + 10 * 4 * 2
        seconds = report.phase_seconds()
        assert seconds["send"] == pytest.approx(0.2)
        assert sum(seconds.values()) == pytest.approx(report.seconds)
        # the pause covers everything but the last look at the versions
        assert report.paused_s == pytest.approx(report.seconds - seconds["versions"])
        # both servers hold the same slices: the learner digests each once
        assert len(learner.asked) == 3
        wire.reset()
        again = await weight_sync.sync(2)
        assert "verify" not in again.phase_seconds()
        assert wire.running
        await weight_sync.close()

    run_virtual(scenario())


def test_names_of_groups_are_never_reused():
    async def scenario():
        names = set()
        for _ in range(3):
            wire = Wire()
            weight_sync, _ = session(wire)
            await weight_sync.open()
            names |= {entry for entry in wire.log if entry.startswith("join opd-")}
        assert len(names) == 3
        assert all(name.endswith(" gloo") for name in names)

    run_virtual(scenario())


@pytest.mark.parametrize("step", [*STEPS, "continue"])
def test_a_failing_step_fails_the_weight_sync_at_once_and_leaves_servers_paused(step):
    async def scenario():
        wire = Wire(fail=step)
        weight_sync, _ = session(wire)
        await weight_sync.open()
        started = asyncio.get_running_loop().time()
        with pytest.raises(WeightSyncFailed, match="http://b:2/x: HTTP 400: no session"):
            await weight_sync.sync(1)
        assert asyncio.get_running_loop().time() - started < 2, "it did not wait for a broadcast"
        assert step == "pause" or not wire.running
        assert step == "continue" or "continue" not in wire.log
        before = len(wire.log)
        with pytest.raises(WeightSyncFailed, match=r"an earlier weight sync failed: .*HTTP 400"):
            await weight_sync.sync(2)
        assert len(wire.log) == before
        assert len(asyncio.all_tasks()) == 1, "no broadcast is left waiting"

    run_virtual(scenario())


@pytest.mark.parametrize("step", [*STEPS, "continue"])
def test_a_silent_step_fails_after_the_limit_and_is_named(step):
    async def scenario():
        wire = Wire(hang=step)
        weight_sync, _ = session(wire)
        await weight_sync.open()
        started = asyncio.get_running_loop().time()
        phase = {"bucket 0": "send", "learner digests": "verify"}.get(step, step)
        match = rf"^{phase}: not done within 24 s \({SETTINGS}\); no answer from {URLS[1]}$"
        weight_sync._fleet.silent = URLS[1:]
        with pytest.raises(WeightSyncFailed, match=match):
            await weight_sync.sync(1)
        assert asyncio.get_running_loop().time() - started < 32
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())


@pytest.mark.parametrize("step", ["manifest", "connect", "join"])
@pytest.mark.parametrize("how", ["fail", "hang"])
def test_a_group_that_does_not_form_fails(step, how):
    async def scenario():
        wire = Wire(**{how: step})
        weight_sync, _ = session(wire)
        with pytest.raises(WeightSyncFailed, match="HTTP 400" if how == "fail" else "not done"):
            await weight_sync.open()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("rank 0: gloo timed out"),
        TimeoutError("no reply in 5 s"),  # the learner's, not to be taken for ours
    ],
)
def test_the_learners_own_error_is_named(error):
    async def scenario():
        wire = Wire(fail="send", error=error)
        weight_sync, _ = session(wire)
        await weight_sync.open()
        with pytest.raises(WeightSyncFailed, match=f"^send: {error}$"):
            await weight_sync.sync(1)

    run_virtual(scenario())


def test_differing_weights_are_named():
    async def scenario():
        wire = Wire()
        wrong = replace(PIECES[1], rank=1, start=2, length=2, digest="garbage")
        wire.pieces = {URLS[0]: PIECES, URLS[1]: [*PIECES, wrong]}
        weight_sync, _ = session(wire)
        await weight_sync.open()
        message = r"http://b:2 rank 1: norm \[2:4\] of dimension 0 differs"
        with pytest.raises(WeightSyncFailed, match=message):
            await weight_sync.sync(1)
        assert not wire.running

    run_virtual(scenario())


def test_a_tensor_without_digest_is_named_but_a_tied_head_is_fine():
    async def scenario(pieces):
        wire = Wire()
        wire.pieces = dict.fromkeys(URLS, pieces)
        weight_sync, _ = session(wire)
        await weight_sync.open()
        await weight_sync.sync(1)

    run_virtual(scenario(PIECES[:2]))
    with pytest.raises(WeightSyncFailed, match="http://a:1 reports no digest of embed"):
        run_virtual(scenario(PIECES[1:]))


@pytest.mark.parametrize(("every", "verified"), [(0, [0]), (1, [0, 1, 2, 3]), (2, [0, 2])])
def test_digests_are_compared_first_and_then_every_so_often(every, verified):
    async def scenario():
        wire = Wire()
        weight_sync, _ = session(wire, verify_every=every)
        await weight_sync.open()
        for index in range(4):
            wire.log.clear()
            wire.reset()
            await weight_sync.sync(index + 1)
            assert ("verify" in wire.log) == (index in verified)

    run_virtual(scenario())


class Staging:
    """A transport that stages all of its tensors but those of `paused`."""

    stages = True
    tensors = frozenset(piece.hf_name for piece in PIECES)
    num_bytes = 8

    def __init__(self, wire):
        self.wire = wire

    async def open(self):
        await self.wire.step("open")

    async def stage(self, version):
        assert self.wire.running
        await self.wire.step("stage")

    async def send(self, version):
        assert not self.wire.running
        await self.wire.step("send")

    async def close(self):
        await self.wire.step("close")


def staging_session(wire, **config):
    settings = WeightSyncConfig(timeout_s=30.0, staging=True, **{"tries": 1} | config)
    return WeightSync(FakeFleet(wire), FakeLearner(wire), Staging(wire), settings)


def test_what_is_staged_is_compared_before_the_pause():
    async def scenario():
        wire = Wire()
        weight_sync = staging_session(wire, verify_every=2)
        await weight_sync.open()
        wire.log.clear()
        first = await weight_sync.sync(1)
        begun = "stage verify_staged learner_digests pause begin send flush end"
        order = [name.replace(" ", "_") for name in wire.log]
        # the first time also that the servers copied the shadow right
        assert order == f"{begun} verify learner_digests continue info".split()
        assert first.paused_s == pytest.approx(0.8)
        wire.log.clear()
        await weight_sync.sync(2)
        assert wire.log == ["stage", "pause", "begin", "send", "flush", "end", "continue", "info"]
        wire.log.clear()
        third = await weight_sync.sync(3)
        assert [n.replace(" ", "_") for n in wire.log] == f"{begun} continue info".split()
        assert third.paused_s == pytest.approx(0.6)
        assert third.phase_seconds()["verify"] == pytest.approx(0.2)

    run_virtual(scenario())


def test_what_is_not_staged_is_compared_in_the_pause():
    async def scenario():
        wire = Wire()
        wire.staged = dict.fromkeys(URLS, PIECES[:1])
        weight_sync = staging_session(wire, verify_every=1)
        await weight_sync.open()
        for version in (1, 2):
            wire.log.clear()
            await weight_sync.sync(version)
            assert wire.log.index("verify staged") < wire.log.index("pause")
            assert wire.log.index("end") < wire.log.index("verify")

    run_virtual(scenario())


def test_servers_of_two_layouts_stage_different_tensors():
    """What one of them does not stage is compared in the pause, and no server is blamed."""

    async def scenario():
        wire = Wire()
        wire.staged = {URLS[0]: PIECES, URLS[1]: PIECES[:1]}
        weight_sync = staging_session(wire, verify_every=1)
        await weight_sync.open()
        for version in (1, 2):
            wire.log.clear()
            await weight_sync.sync(version)
            assert wire.log.index("end") < wire.log.index("verify")

    run_virtual(scenario())


def test_a_bit_that_changed_in_a_shadow_never_goes_live():
    async def scenario():
        wire = Wire()
        damaged = replace(PIECES[1], digest="0" * 16)
        wire.staged[URLS[1]] = [PIECES[0], damaged, PIECES[2]]
        weight_sync = staging_session(wire)
        await weight_sync.open()
        with pytest.raises(WeightSyncFailed, match=f"verify: {URLS[1]} rank 0: norm .* version 1"):
            await weight_sync.sync(1)
        assert "pause" not in wire.log

    run_virtual(scenario())


def test_a_server_that_keeps_its_old_version_fails_the_weight_sync():
    class Stubborn(FakeFleet):
        async def end_weight_update(self, version):
            await self.wire.step("end")
            self.wire.versions[URLS[0]] = version

    async def scenario():
        wire = Wire()
        weight_sync = weight_sync_of(Stubborn(wire), FakeLearner(wire), WeightSyncConfig(tries=1))
        await weight_sync.open()
        with pytest.raises(WeightSyncFailed, match="http://b:2 reports version 0 after version 1"):
            await weight_sync.sync(1)

    run_virtual(scenario())


def test_a_server_of_an_earlier_run_is_refused():
    async def scenario():
        wire = Wire()
        wire.versions[URLS[1]] = 7
        weight_sync, _ = session(wire)
        with pytest.raises(WeightSyncFailed, match="already holds version 7"):
            await weight_sync.open()

    run_virtual(scenario())


def test_syncing_before_opening_is_refused():
    weight_sync, _ = session(Wire())
    with pytest.raises(WeightSyncFailed, match="before the weight sync was opened"):
        run_virtual(weight_sync.sync(1))
