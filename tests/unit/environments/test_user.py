"""A simulated user: the conversation from the other side, in its model's own template."""

import asyncio
from collections.abc import Sequence

import pytest

from megatron_opd.config.environment import UserConfig
from megatron_opd.data.chats import ChatMessage, RowChat
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.play import Played, Player, TurnSample
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.environments.trajectory import trajectory_limits
from megatron_opd.environments.user import (
    SpokenTurn,
    UserPart,
    UserPlaying,
    check_user,
)
from megatron_opd.records.drops import (
    ENVIRONMENT_BAD_REPLY,
    ENVIRONMENT_TIMED_OUT,
    ENVIRONMENT_TOO_LONG,
    TEACHER_UNREACHABLE,
)
from megatron_opd.sim.clock import run_virtual
from tests.support.chat_families import BY_NAME, ChatFamily

STUDENT, TEACHER = BY_NAME["qwen2.5"], BY_NAME["llama3.1"]
ROW = EnvironmentRow("A cake for {stop} people.", "flour", seed=7)
TOLD = "Want: {prompt} Need: {answer} End: {stop}"


def text_of(family: ChatFamily, ids: Sequence[int]) -> str:
    return str(family.tokenizer().decode(list(ids)))


class Says:
    """Speaks given texts in turn, in the ids of a family; remembers what it read."""

    def __init__(self, *texts: str, of: ChatFamily = TEACHER, takes_s: float = 0.0) -> None:
        self._texts, self._of, self._takes_s = iter(texts), of, takes_s
        self.read: list[str] = []
        self.seeds: list[int] = []
        self.preferred: list[str] = []

    async def __call__(self, ids: Sequence[int], seed: int, prefer: str) -> SpokenTurn:
        self.read.append(text_of(self._of, ids))
        self.seeds.append(seed)
        self.preferred.append(prefer)
        await asyncio.sleep(self._takes_s)
        return SpokenTurn(self._of.ids(next(self._texts)), f"http://u:{len(self.read)}")


def play(
    voice: Says,
    answers: Sequence[str] = ("Yes.<|im_end|>",) * 9,
    row: EnvironmentRow = ROW,
    context: int = 10_000,
    **keys: object,
) -> tuple[Played, list[str]]:
    """What was played, and what the student read before each turn."""
    config = UserConfig.model_validate({"instructions": TOLD, **keys})
    part = UserPart(config, voice._of.encoder(), context, "teacher")
    player = Player(STUDENT.encoder(), None, trajectory_limits(config, 1000))
    turns, asked = iter(answers), list[str]()

    async def sample(ids: Sequence[int], room: int, *, stop: Sequence[str] = ()) -> TurnSample:
        asked.append(text_of(STUDENT, ids))
        return TurnSample(STUDENT.ids(next(turns)))

    async def run() -> list[Played]:
        return [await UserPlaying(part, voice, player).play(row, sample)]

    return run_virtual(run())[0], asked


def test_both_sides_of_a_conversation():
    """In the student's ids it is the user; in its own model's template the student is."""
    voice = Says("For seven.<|eot_id|>", "Thank you [END] bye<|eot_id|>")
    found, asked = play(voice, ("For whom?<|im_end|>", "Take <|eot_id|> flour.<|im_end|>"))
    assert (found.ended, found.reward) == ("done", None)
    assert found.answer == "Take <|eot_id|> flour."
    assert [(m.role, m.content) for m in found.chat] == [
        ("user", "A cake for {stop} people."),
        ("assistant", "For whom?"),
        ("user", "For seven."),
        ("assistant", "Take <|eot_id|> flour."),
    ]
    assert asked[1].endswith(
        "For whom?<|im_end|>\n<|im_start|>user\nFor seven.<|im_end|>\n<|im_start|>assistant\n"
    )
    first, second = voice.read
    assert "Want: A cake for {stop} people. Need: flour End: [END]<|eot_id|>" in first
    turn = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
    said = [
        ("user", "Hello! How can I help you today?"),
        ("assistant", "A cake for {stop} people."),
        ("user", "For whom?"),
        ("assistant", "For seven."),
        ("user", "Take <|eot_id|> flour."),
    ]
    opened = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert first.endswith("".join(turn.format(*each) for each in said[:3]) + opened)
    assert second.endswith("".join(turn.format(*each) for each in said) + opened)


def test_the_student_ends_no_turn_of_the_users_conversation():
    """Its control tokens are characters to the user's model: one end token a message."""
    seen: list[Sequence[int]] = []

    class Listens(Says):
        async def __call__(self, ids: Sequence[int], seed: int, prefer: str) -> SpokenTurn:
            seen.append(ids)
            return await super().__call__(ids, seed, prefer)

    play(Listens("[END]"), ("a <|eot_id|> b<|im_end|>",))
    play(Listens("[END]"), ("a b<|im_end|>",))
    end = TEACHER.ids("<|eot_id|>")[0]
    assert [list(ids).count(end) for ids in seen] == [4, 4]


def test_the_user_may_open_the_conversation():
    system = ChatMessage("system", "Be brief.")
    chat = RowChat.of((system, ChatMessage("user", "A cake.")), [{"name": "bake"}])
    voice = Says("I want a cake.<|eot_id|>", "[END]")
    found, asked = play(voice, row=EnvironmentRow(chat, "flour"), opens="user")
    assert "Be brief." in asked[0]
    assert "I want a cake." in asked[0]
    assert "bake" not in asked[0]
    assert [m.content for m in found.chat] == ["Be brief.", "I want a cake.", "Yes."]
    assert "A cake." in voice.read[0]  # its instructions name it
    assert "I want a cake.<|eot_id|>" in voice.read[1]


def test_its_thoughts_are_its_own():
    qwen = BY_NAME["qwen3"]
    voice = Says("<think>\nHm.\n</think>\n\nFor seven.<|im_end|>", "[END]", of=qwen)
    found, asked = play(voice)
    assert found.chat[2].content == "For seven."
    assert "Hm." not in asked[1] + voice.read[1]


def test_max_turns_ends_it_without_another_word():
    voice = Says(*["More.<|eot_id|>"] * 9)
    found, asked = play(voice, max_turns=3)
    assert (found.ended, len(found.turns), len(asked)) == ("max_turns", 3, 3)
    assert len(voice.read) == 2


def test_each_turn_has_a_seed_of_its_own_and_goes_to_the_server_of_the_last():
    one, again = Says("a", "b", "[END]"), Says("a", "b", "[END]")
    play(one)
    play(again)
    assert one.seeds == again.seeds
    assert len(set(one.seeds)) == 3
    assert one.preferred == ["", "http://u:1", "http://u:2"]
    other = Says("[END]")
    play(other, row=EnvironmentRow("A cake.", "flour", seed=8))
    assert other.seeds[0] not in one.seeds


def reason(voice: Says, **keys: object) -> str:
    with pytest.raises(EnvironmentFailed) as failed:
        play(voice, **keys)  # type: ignore[arg-type]
    return failed.value.reason


def test_a_user_that_cannot_be_heard_costs_its_trajectory_with_a_reason():
    class Lost(Says):
        async def __call__(self, ids: Sequence[int], seed: int, prefer: str) -> SpokenTurn:
            raise EnvironmentFailed(TEACHER_UNREACHABLE, "gone")

    assert reason(Lost()) == TEACHER_UNREACHABLE
    assert reason(Says("a", takes_s=61.0)) == ENVIRONMENT_TIMED_OUT
    assert reason(Says(" <|eot_id|>")) == ENVIRONMENT_BAD_REPLY
    assert reason(Says("<think> and so on", of=BY_NAME["qwen3"])) == ENVIRONMENT_BAD_REPLY
    assert reason(Says("[END]"), opens="user") == ENVIRONMENT_BAD_REPLY
    assert reason(Says("a"), row=EnvironmentRow("A cake.")) == ENVIRONMENT_BAD_REPLY
    ends = RowChat.of((ChatMessage("user", "q"), ChatMessage("assistant", "It is")), ())
    assert reason(Says("a"), row=EnvironmentRow(ends, "flour")) == ENVIRONMENT_BAD_REPLY
    assert reason(Says("a"), context=300) == ENVIRONMENT_TOO_LONG


def test_a_row_is_tried_before_the_run():
    def check(family: str, row: EnvironmentRow = ROW, context: int = 10_000) -> None:
        user, encoder = UserConfig(instructions=TOLD), BY_NAME[family].encoder()
        check_user(UserPart(user, encoder, context, "teacher"), row)

    check("llama3.1")
    with pytest.raises(ValueError, match=r"must not name .answer. with rows that have none"):
        check("llama3.1", EnvironmentRow("A cake."))
    with pytest.raises(ValueError, match=r"must fit 44 tokens, .* a short one has \d+; shorten"):
        check("llama3.1", context=300)
