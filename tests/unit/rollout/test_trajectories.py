"""Turns of real replies become one trajectory, ids, draws and versions as they were sampled."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megatron_opd.batching.rank_batch import check_sample
from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.data.render import Rendering
from megatron_opd.environments.play import Played, PlayedTurn, TurnSampler
from megatron_opd.environments.protocol import EnvironmentRow, Said, TrajectoryEnd
from megatron_opd.environments.teacher_reading import TeacherReader
from megatron_opd.environments.trajectory import BuiltTrajectory
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.records.drops import EMPTY_RESPONSE, ENVIRONMENT_BAD_REPLY, ENVIRONMENT_FAILED
from megatron_opd.records.runs import SampledRun, runs_fault
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.records.types import Rollout, VersionSpan
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.rollout.scores import unscored
from megatron_opd.rollout.trajectories import TrajectoryGenerator
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import BadReply, ServerUnreachable
from sglang_bridge.protocol import DrawCache, RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from tests.support.config_files import minimal
from tests.support.fakes import make_prompt
from tests.support.playing import FAMILY, played_here

END = FAMILY.ids("<|im_end|>")[0]
SAMPLING_S, SLOTS = 2.0, 2
SEED = minimal().run.seed
TREE: Any = {"support": {"type": "mc", "m": 4}, "rollout": {"concurrency": SLOTS}}


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
        number = len(self.requests)
        self.working += 1
        self.most = max(self.most, self.working)
        try:
            await asyncio.sleep(SAMPLING_S)
        finally:
            self.working -= 1
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


class Serving:
    """Servers of which one always serves."""

    async def until_none_serves(self) -> None:
        await asyncio.Event().wait()


class Scores:
    """Gives the n-th cached id of N the log-prob n - N."""

    def __init__(self) -> None:
        self.requests: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> ScoreReply:
        self.requests.append(request)
        return ScoreReply(np.arange(-len(request.ids_N), 0, dtype=np.float32), None)


def generator(
    servers: Servers,
    kind: type[Counting] = Counting,
    hold: Rollouts | None = None,
    readers: dict[str, TeacherReader] | None = None,
) -> TrajectoryGenerator:
    config = minimal(**TREE)
    turns = RolloutGenerator(config, servers, 400, "run7", (END,))
    return TrajectoryGenerator(turns, servers, played_here(kind), SEED, hold, readers)


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


def test_a_teacher_reads_a_trajectory_in_its_own_rendering():
    """What it is asked holds what was sampled, at the places of its own rows."""
    encoder = TurnEncoder(FAMILY.tokenizer(), Rendering(True, "Know it."), (END,))
    rollout = run_virtual(
        generator(Servers(), readers={"teacher": TeacherReader(encoder)}).generate(make_prompt(5))
    )
    (ids_S,) = rollout.sequences
    first, *between = rollout.teacher_given
    assert "Know it." in FAMILY.tokenizer().decode(first)
    starts = [run.start for run in rollout.runs]
    stops = [run.stop for run in rollout.runs]
    student = [ids_S[a:b].tolist() for a, b in zip(stops[:-1], starts[1:], strict=True)]
    assert [each.tolist() for each in between] == student, "of the same template"
    fleet = Scores()
    scorer = FleetScorer(minimal(**TREE), {"teacher": fleet}, 400, "run7")
    sample = run_virtual(scorer.score(rollout))
    (asked,) = fleet.requests
    assert list(asked.input_ids) == [*first.tolist(), *ids_S[starts[0] :].tolist()]
    read = [asked.input_ids[a:b].tolist() for a, b in asked.runs]
    assert read == [ids_S[a:b].tolist() for a, b in zip(starts, stops, strict=True)]
    assert sample.teacher_logp_N.tolist() == list(range(-rollout.num_ids, 0))
    other = run_virtual(
        generator(Servers(), readers={"b": TeacherReader(encoder)}).generate(make_prompt(5))
    )
    assert other.teacher_given == (), "another teacher's"


def test_what_a_teacher_s_template_does_not_take_is_dropped():
    class Refusing(TeacherReader):
        def given(self, played: Played):
            raise ValueError("the chat template does not take the messages")

    refusing = Refusing(FAMILY.encoder())
    with pytest.raises(RolloutRejected, match="teacher teacher cannot read it") as rejected:
        run_virtual(generator(Servers(), readers={"teacher": refusing}).generate(make_prompt(5)))
    assert rejected.value.reason == ENVIRONMENT_BAD_REPLY


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


class Forked:
    """Plays one turn, then two at once that follow it, then one behind the first of these."""

    async def play(self, row: EnvironmentRow, sample: TurnSampler) -> Played:
        start = [1, 2, 3]
        first = await sample(start, 9)
        told = [[*start, *first.ids, given] for given in (7, 8)]
        left, right = await asyncio.gather(*(sample(ids, 9, stop=("x",)) for ids in told))
        end = [*told[0], *left.ids, 9]
        last = await sample(end, 9)
        turns = (first, left, right, last)
        sequences = [np.array([*end, *last.ids]), np.array([*told[1], *right.ids])]
        at = [3, len(told[0]), len(told[1]), len(end)]
        where = [
            SampledRun(number == 2, at[number], at[number] + len(turns[number].ids), number)
            for number in (0, 1, 3, 2)
        ]
        built = BuiltTrajectory(tuple(s.astype(np.int32) for s in sequences), tuple(where))
        return Played(built, tuple(PlayedTurn(len(t.ids)) for t in turns), "done", (), "")


def test_turns_of_several_sequences_that_were_sampled_at_once():
    servers = Servers()
    turns = RolloutGenerator(minimal(**TREE), servers, 400, "run7", (END,))
    made = TrajectoryGenerator(turns, servers, Forked(), SEED)
    rollout = run_virtual(made.generate(make_prompt(5)))
    check_sample(unscored(rollout))
    assert runs_fault([len(ids_S) for ids_S in rollout.sequences], rollout.runs) is None
    assert [run.turn for run in rollout.runs] == [0, 1, 3, 2]
    draws = rollout.draws
    assert draws.ids_N[draws.path_T].tolist() == rollout.response_ids_T.tolist()
    # every turn's draws, versions and experts are its own, in the order of the runs
    start = 0
    for run in rollout.runs:
        number, count = run.turn + 1, run.num_tokens
        ids = rollout.response_ids_T[start : start + count].tolist()
        rng = np.random.default_rng(number)
        assert ids == [*rng.integers(5, 90, rng.integers(1, 6)).tolist(), END]
        own = draws.sampler_logp_N[draws.path_T][start : start + count]
        assert own.tolist() == [-2.0 * t - ids[0] for t in range(count)]
        assert rollout.versions_T()[start : start + count].tolist() == [
            number,
            *[number + 1] * (count - 1),
        ]
        start += count
    inputs = len(rollout.sequences[0]) - 1
    assert rollout.experts_XLk is not None
    assert set(rollout.experts_XLk[:inputs].flatten()) == {4}, "of the last turn of each"
    assert set(rollout.experts_XLk[inputs:].flatten()) == {3}
    # each has noise of its own, strings to stop at, and the server that has read its beginning
    asked = [request for request, _ in servers.requests]
    assert len({request.seed for request in asked}) == 4
    assert [request.stop for request in asked] == [(), ("x",), ("x",), ()]
    urls = [f"http://{'ab'[n % 2]}:1" for n in (1, 2)]
    assert [prefer for _, prefer in servers.requests] == ["", urls[0], urls[0], urls[1]]


class Waiting(Counting):
    slow_s = 5.0


def synced_at(
    policy: Any, at_s: float, trajectories: int = 1
) -> tuple[Servers, float, list[Rollout]]:
    """What trajectories became beside a weight sync of a second, and when that began."""
    servers = Servers()

    async def scenario() -> tuple[float, list[Rollout]]:
        clock = asyncio.get_running_loop().time
        hold = Rollouts(policy, Serving())
        made = generator(servers, Waiting, hold)
        running = [asyncio.create_task(made.generate(make_prompt(n))) for n in range(trajectories)]
        await asyncio.sleep(at_s)
        async with hold.held():
            began_s, requests = clock(), len(servers.requests)
            await asyncio.sleep(1.0)
            if policy != "in_place":
                assert len(servers.requests) == requests, "a turn began during the weight sync"
                assert servers.working == 0, "a turn is sampled during the weight sync"
        return began_s, await asyncio.gather(*running)

    began_s, rollouts = run_virtual(scenario())
    return servers, began_s, rollouts


FIRST_TURN_S, ANSWERING_S, SECOND_TURN_S = 1.5, 4.0, 7.5


@pytest.mark.parametrize(
    ("policy", "at_s", "began_s", "restarts"),
    [
        ("in_place", FIRST_TURN_S, FIRST_TURN_S, 0),
        ("keep", FIRST_TURN_S, SAMPLING_S, 0),
        ("abort", FIRST_TURN_S, FIRST_TURN_S, 1),
        ("keep", ANSWERING_S, ANSWERING_S, 0),
        ("abort", ANSWERING_S, ANSWERING_S, 0),
        ("keep", SECOND_TURN_S, 9.0, 0),
        ("abort", SECOND_TURN_S, SECOND_TURN_S, 1),
    ],
)
def test_a_weight_sync_holds_turns_and_waits_for_no_environment(
    policy: str, at_s: float, began_s: float, restarts: int
):
    servers, found_s, (rollout,) = synced_at(policy, at_s)
    assert found_s == began_s
    assert rollout.restarts == restarts
    assert len(rollout.turns) == 3
    assert len(servers.requests) == 3 + restarts


def test_what_is_thrown_away_is_the_turn_alone_and_meets_its_noise_again():
    servers, _, (rollout,) = synced_at("abort", SECOND_TURN_S)
    first, thrown_away, again, _ = [request for request, _ in servers.requests]
    assert thrown_away.seed == again.seed
    assert list(thrown_away.input_ids) == list(again.input_ids)
    assert len(first.input_ids) < len(again.input_ids), "the first turn stays"
    assert rollout.turns[1].sampling_s == pytest.approx(0.5 + 1.0 + SAMPLING_S)


def test_a_weight_sync_waits_for_no_turn_that_waits_for_a_slot():
    servers, began_s, rollouts = synced_at("keep", FIRST_TURN_S, trajectories=5)
    assert began_s == SAMPLING_S, "three trajectories wait behind the two that are sampled"
    assert len(rollouts) == 5
    assert servers.most == SLOTS


def test_a_turn_without_draws_is_a_bad_reply():
    class NoDraws(Servers):
        async def generate(self, request: RolloutRequest, *, prefer: str = "") -> RolloutReply:
            reply = await super().generate(request, prefer=prefer)
            return RolloutReply(reply.output_ids_T, "stop", None, reply.spans, "http://a:1")

    with pytest.raises(BadReply, match="a turn of prompt 5 came back without draws"):
        played(NoDraws())
