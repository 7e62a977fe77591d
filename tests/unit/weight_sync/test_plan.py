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
from megatron_opd.weight_sync.holdings import Held, as_held, learner_holdings, server_holdings
from megatron_opd.weight_sync.plan import (
    Room,
    ServerLayout,
    SyncPlan,
    plan_sync,
    staged_names,
)
from megatron_opd.weight_sync.reshard import CannotReshard, plan_routes
from sglang_bridge.weights.schedule import Bucket
from sglang_bridge.weights.share import PAUSED, STAGED, decode_share
from tests.support.published import spec_of
from tests.support.random_layouts import Case, random_case

LAYOUTS = 2000
Message = tuple[int, tuple[tuple[str, int, int, int], ...]]


def first_receivers(servers: Sequence[ServerLayout]) -> list[int]:
    """Where each server's ranks start among those of all servers, and their number."""
    return list(itertools.accumulate((server.tp for server in servers), initial=0))


def plan_of(case: Case) -> SyncPlan:
    return plan_sync(case.spec, case.parallel, {}, case.servers, case.room)


def shares_of(case: Case, plan: SyncPlan) -> list[dict[str, list[Message]]]:
    """What every receiver is told to expect, as it reads it."""
    found: list[dict[str, list[Message]]] = []
    for text, layout in zip(plan.shares(), case.servers, strict=True):
        for rank in range(layout.tp):
            share = decode_share(text, rank)
            assert share.keys() == {STAGED, PAUSED}
            found.append(
                {
                    kind: [(source, tuple(map(tuple, slices))) for source, slices in listed]
                    for kind, listed in share.items()
                }
            )
    return found


def as_message(bucket: Bucket) -> Message:
    return bucket.source, tuple((p.name, p.dim, p.start, p.length) for p in bucket.parts)


def check_both_ends(plan: SyncPlan, kind: str, shares: list[Any], senders: int) -> None:
    """Between any two ranks the same messages pass in the same order, and no wait is for ever."""
    sent, due = defaultdict(list), defaultdict(list)
    queues = [plan.outgoing(source, staged=kind == STAGED) for source in range(senders)]
    for source, buckets in enumerate(queues):
        for bucket in buckets:
            assert bucket.source == source
            assert {part.kind for part in bucket.parts} == {bucket.kind}
            sent[source, bucket.receiver].append(as_message(bucket))
    for receiver, share in enumerate(shares):
        for message in share[kind]:
            due[message[0], receiver].append(message)
    assert sent == due
    # every rank blocks on the first message of its list that has not passed
    waiting = [list(share[kind]) for share in shares]
    left, moved = [list(buckets) for buckets in queues], True
    while moved:
        moved = False
        for buckets in left:
            while buckets and waiting[buckets[0].receiver][:1] == [as_message(buckets[0])]:
                waiting[buckets.pop(0).receiver].pop(0)
                moved = True
    assert not any(left)
    assert not any(waiting)


def check_parts(case: Case, shares: list[dict[str, list[Message]]]) -> None:
    """Every receiver gets what its layout says, each index once, from a rank that holds it."""
    sources: dict[str, list[Held]] = defaultdict(list)
    for held in as_held(learner_holdings(case.spec, case.parallel), case.room.format):
        sources[held.name].append(held)
    firsts = first_receivers(case.servers)
    for first, layout in zip(firsts, case.servers, strict=False):
        wanted: dict[int, dict[str, Held]] = defaultdict(dict)
        for held in as_held(server_holdings(case.spec, layout.tp, layout.ep), case.room.format):
            for rank in held.ranks:
                wanted[rank][held.name] = held
        for rank in range(layout.tp):
            parts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
            for source, slices in itertools.chain(*shares[first + rank].values()):
                for name, dim, start, length in slices:
                    parts[name].append((dim, start, length))
                    assert any(
                        source in held.ranks
                        and (held.is_whole or held.dim == dim)
                        and (held.is_whole or held.start <= start)
                        and (held.is_whole or start + length <= held.start + held.length)
                        for held in sources[name]
                    ), (name, source)
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
        for held in as_held(server_holdings(case.spec, layout.tp, layout.ep), case.room.format):
            one = {"plain": 2, "numbers": 1, "scales": 4}[held.kind]
            for dim, size in enumerate(held.shape):
                one *= held.length if dim == held.dim else size
            for rank in held.ranks:
                sizes[rank, held.name] += one
        for rank in range(layout.tp):
            share = shares[first + rank]
            names = {
                kind: {name for _, slices in share[kind] for name, *_ in slices} for kind in share
            }
            assert not names[STAGED] & names[PAUSED]
            assert sum(sizes[rank, name] for name in names[STAGED]) <= case.room.max_staged


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


def test_a_plan_for_235b(capsys: pytest.CaptureFixture[str]):
    """64 learner ranks, 8 servers of TP 8 with split experts; seconds are printed, not judged."""
    spec = spec_of("Qwen3-235B-A22B")
    parallel = ParallelConfig(tp=4, pp=2, dp=8, ep=32, etp=1)
    servers = [ServerLayout(8, 8)] * 8
    started = time.perf_counter()
    plan = plan_sync(spec, parallel, {}, servers, Room("bfloat16", None, 2**28, 0))
    planned = time.perf_counter()
    buckets = plan.outgoing(5, staged=False)
    outgoing = time.perf_counter()
    shares = plan.shares()
    done = time.perf_counter()
    assert parallel.world_size == 64
    assert buckets
    with capsys.disabled():
        print(  # noqa: T201
            f"\n235B, 64 ranks to 8 x TP8: plan {planned - started:.1f} s, one rank's messages "
            f"{outgoing - planned:.1f} s, all shares {done - outgoing:.1f} s, "
            f"{max(map(len, shares)) / 2**20:.1f} MiB a server"
        )
