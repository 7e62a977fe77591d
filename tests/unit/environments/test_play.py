"""Trajectories are trained on as they were sampled, whatever an environment says."""

import asyncio
import random
from collections.abc import Awaitable, Sequence

import pytest

from megatron_opd.data.chats import TOOL
from megatron_opd.environments.call_format import call_format
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.guarded import EnvironmentLimits, GuardedEnvironment
from megatron_opd.environments.play import Played, Player, TurnSample
from megatron_opd.environments.protocol import EnvironmentRow, Said, TrajectoryEnd
from megatron_opd.environments.trajectory import TrajectoryLimits
from megatron_opd.records.drops import (
    EMPTY_RESPONSE,
    ENVIRONMENT_BAD_REPLY,
    ENVIRONMENT_FAILED,
    ENVIRONMENT_TOO_LONG,
)
from megatron_opd.records.runs import positions_of, runs_fault
from tests.support.chat_families import ADD, BY_NAME, FAMILIES, ChatFamily

WIDE = TrajectoryLimits(max_turns=6, max_tokens=10**6, max_turn_tokens=1000, max_sequences=8)
ROW = EnvironmentRow("How much is 2 + 3?")
TRAJECTORIES = 1000
PIECES = (
    "🙂",
    "\ud83d",
    "<|im_end|>",
    "</s>",
    "<tool_call>",
    "\uff5c",
    "é",
    "\ufdd0",
    "the tool",
    "\n",
)


class Babbling:
    """Says random texts as a tool or a user, with what looks like control tokens."""

    def __init__(self, seed: int, control: Sequence[str], *, tools: bool) -> None:
        self._random, self._control = random.Random(seed), list(control)
        self.tools = (ADD,) if tools else ()

    def _text(self) -> str:
        pieces = self._random.choices([*PIECES, *self._control], k=self._random.randint(1, 6))
        return "x" + "".join(pieces)

    async def start(self, row: EnvironmentRow):
        return self._text()

    async def step(self, reply: Reply):
        if self._random.random() < 0.25:
            return TrajectoryEnd(1.0)
        if self.tools and self._random.random() < 0.7:
            named = {"name": "add", "tool_call_id": "call00000"}
            return [{"role": "tool", "content": self._text(), **named}]
        return self._text()


class Scripted:
    """Samples given turns, or random ids of a vocabulary with or without an end token."""

    def __init__(self, family: ChatFamily, seed: int = 0, turns: Sequence[str] = ()) -> None:
        self._family, self._random = family, random.Random(seed)
        self._turns = iter(turns)
        self._size = len(family.tokenizer())
        self._ends = family.tokenizer().convert_tokens_to_ids(list(family.ends))
        self.asked: list[list[int]] = []
        self.sampled: list[list[int]] = []

    async def __call__(self, ids: Sequence[int], most: int) -> TurnSample:
        self.asked.append(list(ids))
        text = next(self._turns, None)
        if text is None:
            turn = [self._random.randrange(self._size) for _ in range(self._random.randint(1, 8))]
            turn = [i for i in turn if i not in self._ends]
            turn += [self._random.choice(self._ends)] if self._random.random() < 0.8 else [1]
        else:
            turn = self._family.ids(text)
        self.sampled.append(turn[:most])
        return TurnSample(turn[:most], cut=len(turn) > most)


def player(family: ChatFamily, limits: TrajectoryLimits = WIDE, history="append") -> Player:
    encoder = family.encoder()
    format_ = call_format(encoder) if family.format is not None else None
    return Player(encoder, format_, limits, history)


def playing(of: Player, environment, sample: Scripted) -> Awaitable[Played]:
    partner = GuardedEnvironment(environment, EnvironmentLimits(300.0, 2**16))
    return of.play(partner, ROW, sample)


def play(of: Player, environment, sample: Scripted) -> Played:
    async def run() -> list[Played]:
        return [await playing(of, environment, sample)]  # a list: asyncio prints its task's result

    return asyncio.run(run())[0]


@pytest.mark.parametrize("history", ["append", "branch"])
def test_the_ids_trained_on_are_the_ids_sampled(history: str):
    """On every family's template; the control: decoding and encoding again gives other ids."""
    changed = played = branched = 0

    async def play_all(family: ChatFamily, number: int) -> None:
        nonlocal changed, played, branched
        of = player(family, history=history)
        control = list(of._encoder.literal.control)
        tools = family.tools and family.format is not None
        if history == "branch" and family.name in ("gpt-oss", "mistral"):
            tools = False  # their templates take a tool's result behind a call alone
        for seed in range(number):
            sample = Scripted(family, seed)
            built = (await playing(of, Babbling(seed, control, tools=tools), sample)).trajectory
            assert runs_fault([len(each) for each in built.sequences], built.runs) is None
            trained = [built.sequences[r.sequence][r.start : r.stop].tolist() for r in built.runs]
            assert trained == sample.sampled
            before = [built.sequences[r.sequence][: r.start].tolist() for r in built.runs]
            assert before == sample.asked
            assert built.num_sampled == len(positions_of(built.runs)) == sum(map(len, trained))
            again = [family.ids(family.tokenizer().decode(turn)) for turn in trained]
            changed += again != trained
            branched += len(built.sequences) > 1
            played += 1
            assert len(built.sequences) == 1 or history == "branch"

    number = TRAJECTORIES if history == "append" else TRAJECTORIES // 4
    for family in FAMILIES:
        asyncio.run(play_all(family, number // len(FAMILIES)))
    assert played == number
    assert changed > 0.9 * played
    assert (branched > 0) is (history == "branch")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_an_environment_says_holds_no_more_control_tokens_than_plain_words(family):
    """Given ids of a text with every control token in it, and of one without."""
    of = player(family)
    control = set(of._encoder.literal.control.values())

    def controls(text: str) -> list[int]:
        class Says:
            async def start(self, row):
                return "q"

            async def step(self, reply):
                return text if reply.turn == 0 else TrajectoryEnd()

        turns = [f"said{family.ends[0]}"] * 2
        found = play(of, Says(), Scripted(family, turns=turns)).trajectory
        run = found.runs[1]
        return [i for i in found.sequences[0][: run.start].tolist() if i in control]

    assert controls("x" + "".join(of._encoder.literal.control)) == controls("hello")


def test_qwen3_in_words():
    """A whole trajectory with a tool as the student's server sees it."""
    family = BY_NAME["qwen3"]

    class Adds:
        tools = (ADD,)

        async def start(self, row):
            return row.prompt

        async def step(self, reply):
            if not reply.calls:
                return TrajectoryEnd(1.0 if reply.text == "5" else 0.0)
            (call,) = reply.calls
            content = call.error or str(call.arguments["a"] + call.arguments["b"])
            return [{"role": TOOL, "content": content, "name": "add"}]

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": %s}}\n</tool_call><|im_end|>'
    turns = [call % "x", "<think>\nHm.\n</think>\n\n" + call % 3, "5<|im_end|>"]
    found = play(player(family), Adds(), Scripted(family, turns=turns))
    (ids,) = found.trajectory.sequences
    text = family.tokenizer().decode(ids)
    begun = text.index("<|im_start|>user\nHow much")
    assert text[begun:] == (
        "<|im_start|>user\nHow much is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
        + (call % "x")
        + "\n<|im_start|>user\n<tool_response>\nthe call must be JSON: Expecting value: line 1 "
        "column 44 (char 43)\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "<think>\nHm.\n</think>\n\n"
        + (call % 3)
        + "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n5<|im_end|>"
    )
    assert (found.ended, found.reward, found.answer) == ("done", 1.0, "5")
    assert [turn.num_calls for turn in found.turns] == [1, 1, 0]
    assert [turn.num_call_errors for turn in found.turns] == [1, 0, 0]
    assert [m.role for m in found.chat] == ["user", *["assistant", "tool"] * 2, "assistant"]


class Answers:
    """Answers every turn with the next of these; then ends."""

    def __init__(self, *answers) -> None:
        self._answers = iter(answers)

    async def start(self, row):
        return row.prompt

    async def step(self, reply):
        return next(self._answers, TrajectoryEnd())


THOUGHT = "<think>\nHm.\n</think>\n\n5<|im_end|>"


@pytest.mark.parametrize(("history", "sequences"), [("append", 1), ("branch", 2)])
def test_a_rewritten_history_stays_or_is_another_sequence(history: str, sequences: int):
    family = BY_NAME["qwen3"]
    sample = Scripted(family, turns=[THOUGHT, "6<|im_end|>"])
    found = play(player(family, history=history), Answers("And 1 more?"), sample)
    assert len(found.trajectory.sequences) == sequences
    asked = family.tokenizer().decode(sample.asked[1])
    assert ("Hm." in asked) is (history == "append")
    assert asked.endswith("And 1 more?<|im_end|>\n<|im_start|>assistant\n")
    assert found.trajectory.num_sampled == sum(map(len, sample.sampled))


@pytest.mark.parametrize(
    ("limits", "turns", "ended"),
    [
        (TrajectoryLimits(2, 10**6, 1000, 9), 2, "max_turns"),
        (TrajectoryLimits(9, 10**6, 4, 9), 1, "max_turn_tokens"),
        (TrajectoryLimits(9, 10**6, 1000, 1), 1, "max_sequences"),
        (TrajectoryLimits(9, 10**6, 1000, 9, 12), 2, "max_sampled_tokens"),
        (WIDE, 3, "done"),
    ],
)
def test_a_limit_ends_it_by_its_name(limits: TrajectoryLimits, turns: int, ended: str):
    family = BY_NAME["qwen3"]
    sample = Scripted(family, turns=[THOUGHT] * 3)
    found = play(player(family, limits, "branch"), Answers("More?", "More?"), sample)
    assert (found.ended, len(found.turns)) == (ended, turns)
    assert found.trajectory.num_sampled == sum(map(len, sample.sampled))


def test_the_limit_of_a_sequence_cuts_a_turn_or_leaves_no_room_for_one():
    family = BY_NAME["qwen2.5"]
    whole = play(player(family), Answers("More?"), Scripted(family, turns=["5<|im_end|>"] * 2))
    (ids,) = whole.trajectory.sequences
    first, second = whole.trajectory.runs
    for most, turns in ((len(ids), 2), (len(ids) - 1, 2), (second.start, 1), (first.stop, 1)):
        sample = Scripted(family, turns=["5<|im_end|>"] * 2)
        limits = TrajectoryLimits(9, most, 1000)
        found = play(player(family, limits), Answers("More?"), sample)
        assert len(found.turns) == turns
        assert found.ended == ("done" if most == len(ids) else "max_tokens")
        assert (
            found.trajectory.sequences[0].tolist() == ids[: [0, first.stop, most][turns]].tolist()
        )


def test_rewards_of_turns_are_kept_and_summed():
    family = BY_NAME["qwen2.5"]

    def found(*answers) -> Played:
        turns = ["5<|im_end|>"] * len(answers)
        return play(player(family), Answers(*answers), Scripted(family, turns=turns))

    each = found(Said("a", 0.25), "b", TrajectoryEnd(0.5))
    assert [turn.reward for turn in each.turns] == [0.25, None, 0.5]
    assert each.reward == 0.75
    assert found("a", TrajectoryEnd()).reward is None
    assert found(Said("a", 1e30), TrajectoryEnd(-1e30)).reward == 0.0
    for rewards, match in (((6e29, 6e29), "a finite sum"), ((1e31, 0.0), "at most 1e.30 in size")):
        with pytest.raises(EnvironmentFailed, match=match) as caught:
            found(Said("a", rewards[0]), Said("b", rewards[1]), TrajectoryEnd(0.0))
        assert caught.value.reason == ENVIRONMENT_BAD_REPLY


def reason(environment, family: str = "qwen2.5", limits=WIDE, turns=("5<|im_end|>",) * 3) -> str:
    of = BY_NAME[family]
    with pytest.raises(EnvironmentFailed) as caught:
        play(player(of, limits), environment, Scripted(of, turns=turns))
    return caught.value.reason


def test_a_trajectory_that_cannot_be_used_has_a_reason():
    class Fails(Answers):
        async def step(self, reply):
            raise RuntimeError

    class NoTools(Answers):
        tools = ({"name": "a", "parameters": {"type": 7}},)

    assert reason(Fails()) == ENVIRONMENT_FAILED
    assert reason(NoTools()) == ENVIRONMENT_BAD_REPLY
    assert reason(Answers("a"), turns=("",)) == EMPTY_RESPONSE
    assert reason(Answers("a"), limits=TrajectoryLimits(9, 5, 9)) == ENVIRONMENT_TOO_LONG
    # a template that refuses what was said
    two = [{"role": "user", "content": "a"}] * 2
    assert reason(Answers(two), "mistral", turns=("5</s>",)) == ENVIRONMENT_BAD_REPLY
