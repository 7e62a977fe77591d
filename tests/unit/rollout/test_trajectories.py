"""Turns of real replies become one trajectory, ids, draws and versions as they were sampled."""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from megatron_opd.batching.rank_batch import check_sample
from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.environments.guarded import EnvironmentLimits, GuardedEnvironment
from megatron_opd.environments.play import Player
from megatron_opd.environments.protocol import Said, TrajectoryEnd
from megatron_opd.environments.trajectory import TrajectoryLimits
from megatron_opd.records.drops import EMPTY_RESPONSE, ENVIRONMENT_FAILED
from megatron_opd.records.runs import runs_fault
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.records.types import Rollout, VersionSpan
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scores import unscored
from megatron_opd.rollout.trajectories import Playing, TrajectoryGenerator
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import BadReply, ServerUnreachable
from sglang_bridge.protocol import DrawCache, RolloutReply, RolloutRequest
from tests.support.chat_families import BY_NAME
from tests.support.config_files import minimal
from tests.support.fakes import make_prompt

FAMILY = BY_NAME["qwen2.5"]
END = FAMILY.ids("<|im_end|>")[0]
SAMPLING_S, SLOTS = 2.0, 2
SEED = minimal().run.seed


class Counting:
    """Says a number to each turn, and ends after the third; each turn has a reward."""

    slow_s = 0.0

    async def start(self, row: Any) -> str:
        self._turns, self.row = 0, row
        return f"About {row.prompt}."

    async def step(self, reply: Any) -> Any:
        await asyncio.sleep(self.slow_s)
        self._turns += 1
        if self._turns == 3:
            return TrajectoryEnd(1.0)
        return Said(f"turn {self._turns}", 0.5)


class Raising(Counting):
    async def step(self, reply: Any) -> Any:
        raise RuntimeError("spoilt")


class Host:
    """Gives environments of this process."""

    def __init__(self, kind: type[Counting]) -> None:
        self.kind = kind

    @asynccontextmanager
    async def environment(self):
        yield GuardedEnvironment(self.kind(), EnvironmentLimits(1000.0, 2**20))


def draws_of(ids_T: np.ndarray) -> DrawCache:
    """Each token beside the id above it; the path is the first of the two."""
    count = len(ids_T)
    return DrawCache(
        offsets_T1=np.arange(count + 1, dtype=np.int64) * 2,
        ids_N=np.stack([ids_T, ids_T + 1], 1).flatten().astype(np.int32),
        path_T=np.arange(count, dtype=np.int64) * 2,
        weight_N=np.full(2 * count, 0.5, np.float32),
        sampler_logp_N=-np.arange(2 * count, dtype=np.float32) - ids_T[0],
    )


class Servers:
    """Samples random text; versions rise with time; every second request is lost on request."""

    def __init__(self, loses: int = 0, empty: bool = False) -> None:
        self.requests: list[tuple[RolloutRequest, str]] = []
        self.working = self.most = 0
        self._loses, self._empty = loses, empty

    async def generate(self, request: RolloutRequest, *, prefer: str = "") -> RolloutReply:
        self.requests.append((request, prefer))
        self.working += 1
        self.most = max(self.most, self.working)
        await asyncio.sleep(SAMPLING_S)
        self.working -= 1
        number = len(self.requests)
        if number == self._loses:
            raise ServerUnreachable("http://a:1", "/generate", "reset", sent=True)
        rng = np.random.default_rng(number)
        ids = np.append(rng.integers(5, 90, rng.integers(1, 6)), END).astype(np.int32)
        ids = ids[:0] if self._empty else ids
        inputs = len(request.input_ids) + len(ids) - 1
        experts = np.full((inputs, 2, 1), number, np.uint8)
        spans = ((number, 0, 1), (number + 1, 1, len(ids)))
        draws = draws_of(ids) if len(ids) else None
        url = f"http://{'ab'[number % 2]}:1"
        cached = len(request.input_ids) - 1
        return RolloutReply(ids, "stop", draws, spans, url, experts, None, cached)


def generator(
    servers: Servers, kind: type[Counting] = Counting, **keys: Any
) -> TrajectoryGenerator:
    tree = {"support": {"type": "mc", "m": 4}, "rollout": {"concurrency": SLOTS}}
    config = minimal(**tree)
    turns = RolloutGenerator(config, servers, 400, "run7", (END,))
    limits = TrajectoryLimits(8, 10_000, 64)
    player = Player(FAMILY.encoder(), None, limits)
    return TrajectoryGenerator(turns, servers, Playing(Host(kind), player), SEED)  # type: ignore[arg-type]


def played(servers: Servers, kind: type[Counting] = Counting) -> Rollout:
    return run_virtual(generator(servers, kind).generate(make_prompt(5)))


def test_a_trajectory_is_what_was_sampled_turn_by_turn():
    servers = Servers()
    rollout = played(servers)
    check_sample(unscored(rollout))
    (ids_S,) = rollout.sequences
    replies = [np.random.default_rng(n) for n in (1, 2, 3)]
    sampled = [[*rng.integers(5, 90, rng.integers(1, 6)).tolist(), END] for rng in replies]
    assert rollout.response_ids_T.tolist() == [i for ids in sampled for i in ids]
    assert [run.turn for run in rollout.runs] == [0, 1, 2]
    for run, ids, (request, _) in zip(rollout.runs, sampled, servers.requests, strict=True):
        assert ids_S[run.start : run.stop].tolist() == ids
        assert list(request.input_ids) == ids_S[: run.start].tolist(), "all before it, as sampled"
    given = FAMILY.tokenizer().decode(ids_S[rollout.runs[0].stop : rollout.runs[1].start])
    assert given == "\n<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\n"
    draws = rollout.draws
    assert draws.ids_N[draws.path_T].tolist() == rollout.response_ids_T.tolist()
    starts = np.cumsum([0, *map(len, sampled)])
    for number, (first, ids) in enumerate(zip(starts, sampled, strict=False), 1):
        own = draws.sampler_logp_N[draws.path_T][first : first + len(ids)]
        assert own.tolist() == [-2.0 * t - ids[0] for t in range(len(ids))]
        tokens = rollout.versions_T()[first : first + len(ids)].tolist()
        assert tokens == [number, *[number + 1] * (len(ids) - 1)]
    edges = [1, starts[1] + 1, starts[2] + 1, starts[3]]
    versions = [1, 2, 3, 4]  # one turn ends with the version that the next one begins with
    firsts = [0, *edges[:-1]]
    spans = zip(versions, firsts, edges, strict=True)
    assert rollout.spans == tuple(VersionSpan(*map(int, span)) for span in spans)
    assert rollout.experts_XLk is not None
    assert len(rollout.experts_XLk) == len(ids_S) - 1
    assert (rollout.experts_XLk == 3).all(), "of the last turn, which read all inputs"
    assert rollout.reward == 2.0
    assert [turn.reward for turn in rollout.turns] == [0.5, 0.5, 1.0]
    assert rollout.finish_reason == "stop"
    assert [turn.sampling_s for turn in rollout.turns] == [SAMPLING_S] * 3
    assert rollout.turns[1].cached == len(servers.requests[1][0].input_ids) - 1


def test_a_turn_goes_back_to_the_server_of_the_one_before_with_noise_of_its_own():
    servers = Servers()
    played(servers)
    assert [prefer for _, prefer in servers.requests] == ["", "http://b:1", "http://a:1"]
    seeds = [request.seed for request, _ in servers.requests]
    assert seeds[0] == derived_seed(SEED, ROLLOUT, 5), "as of a single turn"
    assert seeds[1:] == [derived_seed(SEED, ROLLOUT, 5, turn) for turn in (1, 2)]
    assert len({request.rid for request, _ in servers.requests}) == 3


def test_a_lost_turn_is_sampled_anew_and_what_came_before_stays():
    servers = Servers(loses=2)
    rollout = played(servers)
    assert rollout.restarts == 1
    first, lost, again, _ = servers.requests
    assert list(lost[0].input_ids) == list(again[0].input_ids)
    assert lost[0].seed == again[0].seed
    assert lost[0].rid != again[0].rid
    assert len(first[0].input_ids) < len(again[0].input_ids)


@pytest.mark.parametrize(
    ("servers", "kind", "reason"),
    [
        (Servers(empty=True), Counting, EMPTY_RESPONSE),
        (Servers(), Raising, ENVIRONMENT_FAILED),
    ],
)
def test_what_cannot_be_used_is_dropped_with_its_reason(
    servers: Servers, kind: type[Counting], reason: str
):
    with pytest.raises(RolloutRejected) as rejected:
        played(servers, kind)
    assert rejected.value.reason == reason


def test_no_slot_is_held_while_an_environment_answers():
    """Twelve trajectories on two slots: three turns each, and ten seconds of environment a turn."""

    class Slow(Counting):
        slow_s = 10.0

    servers = Servers()

    async def all_of_them(trajectories: Sequence[int]) -> float:
        begun = asyncio.get_running_loop().time()
        made = generator(servers, Slow)
        rollouts = await asyncio.gather(*(made.generate(make_prompt(n)) for n in trajectories))
        for rollout in rollouts:
            assert runs_fault([len(s) for s in rollout.sequences], rollout.runs) is None
        return asyncio.get_running_loop().time() - begun

    seconds = run_virtual(all_of_them(range(12)))
    assert servers.most == SLOTS
    blocked = 12 * 3 * (SAMPLING_S + Slow.slow_s) / SLOTS
    assert seconds < blocked / 3, "216 s if a trajectory kept its slot"


def test_a_turn_without_draws_is_a_bad_reply():
    class NoDraws(Servers):
        async def generate(self, request: RolloutRequest, *, prefer: str = "") -> RolloutReply:
            reply = await super().generate(request, prefer=prefer)
            return RolloutReply(reply.output_ids_T, "stop", None, reply.spans, "http://a:1")

    with pytest.raises(BadReply, match="a turn of prompt 5 came back without draws"):
        played(NoDraws())
