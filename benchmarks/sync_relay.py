"""Plans of weight syncs to many servers, with and without weight_sync.relay: bytes and seconds.

    python -m benchmarks sync_relay

Nothing runs but the plans. For each learner and number of servers: the bytes that the busiest
learner rank sends, that the busiest server rank passes on and that a server rank receives; what
`opd check` predicts from them at LINK_GBS a rank and direction; and, with up to SIMULATED server
ranks, how long the plan's own messages take there. That schedule keeps every rank's order, sends
and receives one message at a time in each direction, and passes on a message once it is there.
Besides: the seconds that the plan takes, the messages of one learner rank and a server's share of
the plan, as the run's processes make them, and the bytes of that share.

What it cannot say: links are taken to be equal, at their full speed whoever talks to whom, and to
have no latency; packing, casts and GPUs cost nothing. Nothing is measured but the planning itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.tree import ROOT
from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.weight_sync.plan import ServerLayout, SyncPlan, SyncSettings, plan_sync
from megatron_opd.weight_sync.sizes import GB, sync_sizes
from sglang_bridge.weights.formats import PLAIN_BYTES
from sglang_bridge.weights.message_order import Bucket, Onward, SlicePlace, incoming
from sglang_bridge.weights.share import decode_share

MODELS = ROOT / "examples" / "cluster" / "models"
LINK_GBS = 50.0
SIMULATED = 64
Tree = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A learner and its servers, each of `tp` ranks that split the experts, if there are any."""

    model: str
    parallel: tuple[tuple[str, int], ...]
    servers: int
    tp: int

    @property
    def name(self) -> str:
        """Names its row."""
        cut = " ".join(f"{key}{size}" for key, size in self.parallel)
        return f"{self.model}, {cut} to {self.servers} x TP{self.tp}"

    def config(self, spec: ModelSpec, *, relay: bool) -> Config:
        """Return what `opd check` would read."""
        server: Tree = {"model": str(MODELS / self.model), "dtype": "bfloat16"}
        ep = self.tp if spec.is_moe else 1
        return Config.model_validate(
            {
                "data": {"train": "unused"},
                "student": server | {"servers": self.servers, "tp": self.tp, "ep": ep},
                "teacher": server,
                "learner": {"dtype": "bfloat16", "parallel": dict(self.parallel)},
                "weight_sync": {"relay": relay},
            }
        )


_LARGE = (("tp", 4), ("pp", 2), ("dp", 8), ("ep", 32), ("etp", 1))
_MIDDLE = (("tp", 2), ("pp", 2), ("dp", 4), ("ep", 8), ("etp", 1))
CASES = (
    Case("Qwen3-1.7B", (("dp", 8),), 4, 1),
    Case("Qwen3-1.7B", (("tp", 2), ("dp", 4)), 32, 1),
    *(Case("Qwen3-30B-A3B", _MIDDLE, servers, 2) for servers in (2, 8, 32)),
    *(Case("Qwen3-235B-A22B", _LARGE, servers, 8) for servers in (1, 8, 64)),
)


def measure() -> Tree:
    """Plan every case both ways."""
    rows: Tree = {}
    for case in CASES:
        spec = read_model_spec(MODELS / case.model)
        rows[case.name] = {
            "relay" if relay else "direct": figures(case, spec, case.config(spec, relay=relay))
            for relay in (False, True)
        }
    return {"link_gbs": LINK_GBS, "cases": rows}


def figures(case: Case, spec: ModelSpec, config: Config) -> Tree:
    """Return the bytes and seconds of one case."""
    sizes = sync_sizes(config, spec)
    layouts = [ServerLayout(case.tp, config.student.ep)] * case.servers
    learner, settings = config.learner, SyncSettings.of(config.weight_sync, "bfloat16", None)
    urls = [f"http://host-{index:03}:30000" for index in range(case.servers)]
    clock = [time.perf_counter()]
    plan = plan_sync(spec, learner.parallel, learner.megatron, layouts, settings)
    clock.append(time.perf_counter())
    plan.outgoing(0, staged=False)
    clock.append(time.perf_counter())
    shares = plan.shares(urls)
    clock.append(time.perf_counter())
    decode_share(shares[0], 0)
    clock.append(time.perf_counter())
    names = ("plan_s", "learner_rank_messages_s", "all_shares_s", "server_rank_messages_s")
    spent = [round(stop - start, 4) for start, stop in itertools.pairwise(clock)]
    replicas = [len(route.sources) for route in plan.layouts[0].paused]
    found: Tree = {
        "replicas": sorted(set(replicas)),
        "sent_by_busiest_learner_rank": max(sizes.sent),
        "passed_on_by_busiest_server_rank": max(sizes.passed_on),
        "received_by_busiest_server_rank": max(sizes.received),
        "predicted_s": round(sizes.seconds(LINK_GBS), 4),
        "share_bytes": len(shares[0]),
        **dict(zip(names, spent, strict=True)),
    }
    if case.servers * case.tp <= SIMULATED:
        found["scheduled_s"] = round(scheduled_s(all_lists(plan, case.tp), LINK_GBS), 4)
    return found


def all_lists(plan: SyncPlan, tp: int) -> list[list[Bucket]]:
    """Return what every rank of the group sends and receives, in order, of servers of one layout.

    tp: ranks of a server.
    """
    senders, (layout,) = plan.limits.senders, plan.layouts
    lists = [plan.outgoing(source, staged=False) for source in range(senders)]
    for index in range(len(layout.firsts)):
        place = SlicePlace(index, layout.firsts)
        for rank in range(tp):
            received: list[Bucket] = []
            listed: list[Bucket] = []
            for step in incoming(layout.paused, place, rank, plan.limits):
                if isinstance(step, Onward):
                    held = received[step.number]
                    listed.append(Bucket(senders + held.receiver, step.receiver, held.parts))
                else:
                    received.append(step)
                    listed.append(step)
            lists.append(listed)
    return lists


def scheduled_s(lists: Sequence[Sequence[Bucket]], link_gbs: float) -> float:
    """Return when the last message is there, in seconds; messages in bfloat16.

    Each rank sends its messages in order, and receives its in order. lists: of every rank of the
    group, the learner's first.
    """
    senders = len(lists) - 1 - max(bucket.receiver for listed in lists for bucket in listed)
    next_ = [0] * len(lists)
    sends_from, receives_from = [0.0] * len(lists), [0.0] * len(lists)
    there_at: dict[tuple[int, Any], float] = {}
    waiting = set(range(len(lists)))
    while waiting:
        rank = waiting.pop()
        while next_[rank] < len(lists[rank]):
            bucket = lists[rank][next_[rank]]
            ends = bucket.sender, senders + bucket.receiver
            other = ends[rank == ends[0]]
            if next_[other] == len(lists[other]) or lists[other][next_[other]] != bucket:
                break  # the other end comes back here
            held_from = there_at.get((ends[0], bucket.parts), 0.0)
            start = max(sends_from[ends[0]], receives_from[ends[1]], held_from)
            end = start + bucket.elements * PLAIN_BYTES["bfloat16"] / (link_gbs * GB)
            sends_from[ends[0]] = receives_from[ends[1]] = there_at[ends[1], bucket.parts] = end
            next_[rank] += 1
            next_[other] += 1
            waiting.add(other)
    assert all(at == len(listed) for at, listed in zip(next_, lists, strict=True)), "blocked"
    return max(receives_from)
