"""A whole plan at both its ends: learner and servers agree, and every number arrives once."""

import itertools
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.weight_sync.holdings import Held, as_held, learner_holdings, server_holdings
from megatron_opd.weight_sync.plan import (
    ServerLayout,
    SyncPlan,
    SyncSettings,
    plan_sync,
    staged_names,
)
from megatron_opd.weight_sync.reshard import CannotReshard, plan_routes
from sglang_bridge.weights.message_order import ALONE, Bucket
from sglang_bridge.weights.share import PAUSED, PEERS, STAGED, decode_share
from tests.support.paths import ROOT
from tests.support.published import spec_of
from tests.support.random_layouts import Case, random_case

LAYOUTS = 2000
Slices = tuple[tuple[str, int, int, int], ...]
Message = tuple[int, int, Slices]
"""sender and receiver, ranks of the group, and what it holds"""


def first_receivers(servers: Sequence[ServerLayout]) -> list[int]:
    """Where each server's ranks start among those of all servers, and their number."""
    return list(itertools.accumulate((server.tp for server in servers), initial=0))


def plan_of(case: Case) -> SyncPlan:
    return plan_sync(case.spec, case.parallel, {}, case.servers, case.settings, case.near)


def shares_of(case: Case, plan: SyncPlan) -> list[dict[str, list[Message]]]:
    """What every rank of a server receives and passes on, in order, as it reads it."""
    found: list[dict[str, list[Message]]] = []
    urls = [f"s{server}" for server in range(len(case.servers))]
    for server, (text, layout) in enumerate(zip(plan.shares(urls), case.servers, strict=True)):
        for rank in range(layout.tp):
            share, me = decode_share(text, rank), case.parallel.world_size + len(found)
            names = share.pop(PEERS)
            assert names[me] == f"s{server} rank {rank}"
            assert share.keys() == {STAGED, PAUSED}
            found.append({kind: messages(listed, me) for kind, listed in share.items()})
    return found


def messages(listed: list[Any], me: int) -> list[Message]:
    """Those of a share, all of them whole: one that is passed on has been received before."""
    found: list[Message] = []
    for peer, held in listed:
        if isinstance(held, int):
            received = [message for message in found if message[1] == me]
            found.append((me, peer, received[held][2]))
        else:
            found.append((peer, me, tuple(map(tuple, held))))
    return found


def as_message(bucket: Bucket, senders: int) -> Message:
    parts = tuple((p.name, p.dim, p.start, p.length) for p in bucket.parts)
    return bucket.sender, senders + bucket.receiver, parts


def check_both_ends(plan: SyncPlan, kind: str, shares: list[Any], senders: int) -> None:
    """Between any two ranks the same messages pass in the same order, and no wait is for ever."""
    sent, due = defaultdict(list), defaultdict(list)
    queues: list[list[Message]] = []
    for source in range(senders):
        buckets = plan.outgoing(source, staged=kind == STAGED)
        assert all({part.kind for part in b.parts} == {b.kind} for b in buckets)
        queues.append([as_message(bucket, senders) for bucket in buckets])
    queues += [share[kind] for share in shares]
    for rank, queue in enumerate(queues):
        for message in queue:
            ends = message[:2]
            (sent if ends[0] == rank else due)[ends].append(message)
            assert rank in ends
    assert sent == due
    # every rank blocks on the first message of its list that has not passed
    left, moved = [list(queue) for queue in queues], True
    while moved:
        moved = False
        for rank, queue in enumerate(left):
            while queue and queue[0][0] == rank and left[queue[0][1]][:1] == queue[:1]:
                left[queue[0][1]].pop(0)
                queue.pop(0)
                moved = True
    assert not any(left)


def check_sent_once(case: Case, shares: list[dict[str, list[Message]]]) -> None:
    """No rank of a server sends a slice twice, nor without relays any."""
    senders = case.parallel.world_size
    for me, share in enumerate(shares, senders):
        passed_on = [
            (receiver, piece)
            for listed in share.values()
            for sender, receiver, pieces in listed
            if sender == me
            for piece in pieces
        ]
        assert case.settings.relays or not passed_on
        assert len({piece for _, piece in passed_on}) == len(passed_on)


def check_learner_sends_once(case: Case, plan: SyncPlan) -> None:
    """No rank of the learner sends a slice to the same rank of two servers of a layout."""
    firsts = first_receivers(case.servers)
    ranks = {
        first + rank: (layout, rank)
        for first, layout in zip(firsts, case.servers, strict=False)
        for rank in range(layout.tp)
    }
    for source in range(case.parallel.world_size):
        sent = [
            (ranks[bucket.receiver], part)
            for staged in (True, False)
            for bucket in plan.outgoing(source, staged=staged)
            for part in bucket.parts
        ]
        assert len(set(sent)) == len(sent)


def check_parts(case: Case, shares: list[dict[str, list[Message]]]) -> None:
    """Every receiver gets what its layout says, each index once, from a rank that holds it.

    From the rank on its GPU where that does.
    """
    senders = case.parallel.world_size
    sources: dict[str, list[Held]] = defaultdict(list)
    for held in as_held(learner_holdings(case.spec, case.parallel), case.settings.format):
        sources[held.name].append(held)
    firsts = first_receivers(case.servers)
    for first, layout in zip(firsts, case.servers, strict=False):
        wanted: dict[int, dict[str, Held]] = defaultdict(dict)
        for held in as_held(server_holdings(case.spec, layout.tp, layout.ep), case.settings.format):
            for rank in held.ranks:
                wanted[rank][held.name] = held
        for rank in range(layout.tp):
            parts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
            near = case.near[first + rank] if case.near else -1
            for source, receiver, slices in itertools.chain(*shares[first + rank].values()):
                if receiver != senders + first + rank:
                    continue
                for name, dim, start, length in slices:
                    parts[name].append((dim, start, length))
                    # who passes it on has received it: check_both_ends
                    holders = {
                        holder
                        for held in sources[name]
                        if held.is_whole
                        or (
                            held.dim == dim
                            and held.start <= start
                            and start + length <= held.start + held.length
                        )
                        for holder in held.ranks
                    }
                    assert source >= senders or source in holders, (name, source)
                    assert source == near or near not in holders, (name, source)
            assert parts.keys() == wanted[rank].keys()
            for name, held in wanted[rank].items():
                (dim,) = {dim for dim, _, _ in parts[name]}
                assert dim == held.dim or held.is_whole
                end = 0 if held.is_whole else held.start
                for _, start, length in sorted(parts[name]):
                    assert start == end, (name, rank)
                    assert length > 0
                    end += length
                assert end == (held.shape[dim] if held.is_whole else held.start + held.length)


def check_staged(case: Case, shares: list[dict[str, list[Message]]]) -> None:
    """A tensor is staged whole or not at all, and a rank stages no more than it has room for."""
    firsts = first_receivers(case.servers)
    for first, layout in zip(firsts, case.servers, strict=False):
        sizes: Counter[tuple[int, str]] = Counter()
        for held in as_held(server_holdings(case.spec, layout.tp, layout.ep), case.settings.format):
            one = {"plain": 2, "exact": 4, "numbers": 1, "scales": 4}[held.kind]
            for dim, size in enumerate(held.shape):
                one *= held.length if dim == held.dim else size
            for rank in held.ranks:
                sizes[rank, held.name] += one
        for rank in range(layout.tp):
            share = shares[first + rank]
            names = {
                kind: {name for *_, slices in share[kind] for name, *_ in slices} for kind in share
            }
            assert not names[STAGED] & names[PAUSED]
            assert sum(sizes[rank, name] for name in names[STAGED]) <= case.settings.max_staged


@pytest.mark.parametrize("block", range(4))
def test_random_layouts_are_planned_whole(block: int):
    for seed in range(block, LAYOUTS, 4):
        case = random_case(seed)
        plan = plan_of(case)
        shares = shares_of(case, plan)
        senders = case.parallel.world_size
        try:
            check_both_ends(plan, STAGED, shares, senders)
            check_both_ends(plan, PAUSED, shares, senders)
            check_parts(case, shares)
            check_staged(case, shares)
            check_sent_once(case, shares)
            if case.settings.relays:
                check_learner_sends_once(case, plan)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"random_case({seed}): {case}") from error


def test_a_plan_is_the_same_wherever_it_is_made():
    """Learner and controller plan apart: nothing may depend on the process, as order of sets."""
    program = (
        "import hashlib, sys; from tests.unit.weight_sync.test_plan import *\n"
        "cases = [random_case(seed) for seed in range(40)]\n"
        "text = repr([shares_of(case, plan_of(case)) for case in cases])\n"
        "assert 'torch' not in sys.modules\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_what_is_staged_is_as_many_tensors_as_every_rank_has_room_for():
    held = [
        Held("a", (8, 2), 0, 0, 4, (0,)),
        Held("a", (8, 2), 0, 4, 4, (1,)),
        Held("b", (3,), 0, 0, 3, (0, 1)),
        Held("c", (1,), 0, 0, 1, (1,)),
    ]
    rooms = (0, 7.9, 8, 11, 12, float("inf"))
    found = {room: staged_names(held, 2 * room, {"plain": 2}) for room in rooms}
    assert found == {
        0: set(),
        7.9: set(),
        8: {"a"},
        11: {"a", "b"},
        12: {"a", "b", "c"},
        float("inf"): {"a", "b", "c"},
    }


def test_what_the_learner_cannot_give_is_refused():
    """A server of another model: more layers than the learner has."""
    case = random_case(0)
    taller = spec_of("Qwen3-30B-A3B")
    with pytest.raises(CannotReshard, match="the servers hold a tensor that the learner lacks"):
        plan_routes(learner_holdings(case.spec, case.parallel), server_holdings(taller, 1, 1))


@pytest.mark.parametrize(
    ("example", "peers", "messages"),
    [("one_node", 3, 201), ("four_nodes", 8, 4854), ("sixteen_nodes", 32, 9512)],
)
def test_what_a_server_rank_of_the_examples_receives(example: str, peers: int, messages: int):
    """Its largest numbers of learner ranks and of messages; docs/weight_sync.md has them too.

    On NCCL a message is a launch: beside one small one from each peer all are long.
    """
    config = load_config(Config, ROOT / "examples" / "cluster" / example / "config.yaml")
    student, parallel = config.student, config.learner.parallel
    servers = [ServerLayout(student.tp, student.ep)] * student.servers
    settings = SyncSettings.of(config.weight_sync, "bfloat16", student.quantization)
    plan = plan_sync(
        spec_of(student.model.name), parallel, config.learner.megatron, servers, settings
    )
    received: dict[int, list[Bucket]] = defaultdict(list)
    for source in range(parallel.world_size):
        for bucket in plan.outgoing(source, staged=False):
            received[bucket.receiver].append(bucket)
    assert max(map(len, received.values())) == messages
    for buckets in received.values():
        assert len({bucket.sender for bucket in buckets}) <= peers
        short = Counter(bucket.sender for bucket in buckets if bucket.elements < ALONE)
        assert set(short.values()) <= {1}


def test_a_plan_for_235b(capsys: pytest.CaptureFixture[str]):
    """64 learner ranks, 8 servers of TP 8 with split experts; seconds are printed, not judged."""
    spec = spec_of("Qwen3-235B-A22B")
    parallel = ParallelConfig(tp=4, pp=2, dp=8, ep=32, etp=1)
    servers = [ServerLayout(8, 8)] * 8
    started = time.perf_counter()
    plan = plan_sync(spec, parallel, {}, servers, SyncSettings("bfloat16", None, 2**28, 0))
    planned = time.perf_counter()
    buckets = plan.outgoing(5, staged=False)
    outgoing = time.perf_counter()
    shares = plan.shares([f"http://host{index}:30000" for index in range(8)])
    done = time.perf_counter()
    assert parallel.world_size == 64
    assert buckets
    with capsys.disabled():
        print(  # noqa: T201
            f"\n235B, 64 ranks to 8 x TP8: plan {planned - started:.1f} s, one rank's messages "
            f"{outgoing - planned:.1f} s, all shares {done - outgoing:.1f} s, "
            f"{max(map(len, shares)) / 2**20:.1f} MiB a server"
        )
