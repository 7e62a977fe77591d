"""Bodies of an agent's requests -> what the student is asked, and what is recorded of it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from checks.fuzz.engine import Target
from checks.fuzz.mutations import TEXTS, damaged_json
from megatron_opd.data.literal import NOT_TEXT, REPLACEMENT
from megatron_opd.environments.agent.answers import chunks, completion
from megatron_opd.environments.agent.call import read_call
from megatron_opd.environments.agent.recorder import AgentTrajectory
from megatron_opd.environments.agent.refused import Refused
from megatron_opd.environments.play import TurnSample
from megatron_opd.records.runs import runs_fault
from tests.support.agent_calls import SAMPLING, WIDE, student
from tests.support.chat_families import ADD, BY_NAME

FAMILY = BY_NAME["qwen2.5"]  # its template only appends, so that all that is asked is in its text
END = "<|im_end|>"
ROOM = WIDE.max_turn_tokens
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3.0}}\n</tool_call>'
SAID = (f"I add. {CALL}{END}", f"It is 5.{END}", f"the tool says{END}")
"""The turns of a trajectory: two before the request of an input, and its answer."""
ASKED = {"role": "user", "content": "How much is 2 + 3?"}
MORE = {"role": "user", "content": "And 1 more?"}
TOOL = {"role": "tool", "tool_call_id": "call00000", "content": "5"}
MADE = {"name": "add", "arguments": '{"b": 3, "a": 2}'}
CALLS = [{"id": "call00000", "type": "function", "function": MADE}]
FIRST = {"role": "assistant", "content": "I add.", "tool_calls": CALLS}
SECOND = {"role": "assistant", "content": "It is 5."}
SYSTEM = {"role": "system", "content": "Be short."}


def _body(*messages: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    return {"model": "student", "messages": list(messages), "tools": [ADD], **keys}


BODIES = [
    _body(ASKED, FIRST, TOOL, SECOND, MORE, temperature=0.5, max_tokens=9, stop=["x"]),
    _body(ASKED, FIRST, TOOL, SECOND, MORE, stream=True, stream_options={"include_usage": True}),
    _body(ASKED, FIRST, TOOL, n=1, tool_choice="auto", stop="says", logprobs=False),
    _body(SYSTEM, ASKED, {**FIRST, "content": [{"type": "text", "text": "I add."}]}, TOOL, seed=4),
    _body(ASKED, SECOND, MORE, response_format={"type": "text"}, parallel_tool_calls=True),
    _body(ASKED, tool_choice="none", max_completion_tokens=3, user="me", logit_bias={}),
]


@dataclass(frozen=True)
class Recorded:
    """What the student was asked by the last request, and what its answer was recorded for."""

    asked: str
    room: int
    stop: tuple[str, ...]
    sent: dict[str, Any]
    fault: str | None


@dataclass
class _Sampler:
    """Says the turns one after another."""

    asked: list[tuple[list[int], int, tuple[str, ...]]]
    sampled: list[list[int]]

    async def __call__(
        self, ids: Sequence[int], room: int, *, stop: Sequence[str] = ()
    ) -> TurnSample:
        turn = FAMILY.ids(SAID[len(self.sampled)])[:room]
        self.asked.append((list(ids), room, tuple(stop)))
        self.sampled.append(turn)
        return TurnSample(turn, len(turn) == room)


@cache
def _student() -> Any:
    return student(FAMILY)


def call(body: bytes) -> Recorded:
    """Two turns, then the request."""

    async def play() -> Recorded:
        sampler = _Sampler([], [])
        trajectory = AgentTrajectory(_student(), sampler, 300.0)
        try:
            for known in (_body(ASKED), _body(ASKED, FIRST, TOOL)):
                await trajectory.answer(read_call(json.dumps(known).encode(), SAMPLING))
            asked = read_call(body, SAMPLING)
            answer = await trajectory.answer(asked)
        finally:
            await trajectory.close()
        sent = completion("x", answer)
        parts = b"".join(chunks("x", answer, usage=True)).decode().split("\n\n")
        fault = None if parts[-2] == "data: [DONE]" else "a stream without an end"
        built = trajectory.played(None).trajectory
        fault = fault or runs_fault([len(each) for each in built.sequences], built.runs)
        for run in built.runs:
            ids = built.sequences[run.sequence].tolist()
            before = ids[: run.start] == sampler.asked[run.turn][0]
            if not before or ids[run.start : run.stop] != sampler.sampled[run.turn]:
                fault = "a turn that is trained on behind other ids than it was sampled"
        ids, room, stop = sampler.asked[-1]
        return Recorded(_decoded(ids), room, stop, json.loads(json.dumps(sent)), fault)

    return asyncio.run(play())


def oracle(body: bytes, found: Recorded) -> str | None:
    """The student was asked what the body says, and nothing that is not done was asked for."""
    if found.fault is not None:
        return found.fault
    asked = {name: value for name, value in json.loads(body).items() if value is not None}
    limits = [asked[name] for name in ("max_tokens", "max_completion_tokens") if name in asked]
    if found.room != min([ROOM, *limits]):
        return "another limit than was asked for"
    stop = asked.get("stop", [])
    if found.stop != ((stop,) if isinstance(stop, str) else tuple(stop)):
        return "other strings to stop at"
    if any(text in (found.sent["choices"][0]["message"]["content"] or "") for text in found.stop):
        return "an answer that goes on behind what it stops at"
    for name, allowed in ONLY.items():
        if asked.get(name, allowed[0]) not in allowed:
            return f"{name} that is not done"
    tools = [] if asked.get("tool_choice") == "none" else asked.get("tools", [])
    if any(tool["function"].get("strict") for tool in tools):
        return "a tool that is strict"
    return None if found.asked == _written(asked) else "another prompt than the messages"


ONLY: dict[str, tuple[Any, ...]] = {
    "model": ("student",),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "n": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
}


def _written(asked: Mapping[str, Any]) -> str:
    """What the template writes of the messages, the answers as they were sampled."""
    tools = [] if asked.get("tool_choice") == "none" else copy.deepcopy(asked.get("tools") or [])
    for tool in tools:
        tool["function"].pop("strict", None)
    chat = [_message(message) for message in asked["messages"]]
    tokenizer: Any = FAMILY.tokenizer()
    return tokenizer.apply_chat_template(
        chat, tools=tools or None, tokenize=False, add_generation_prompt=True
    )


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if message["role"] != "assistant":
        return {"role": message["role"], "content": NOT_TEXT.sub(REPLACEMENT, text)}
    calls = [_call(each) for each in message.get("tool_calls") or ()]
    # a call without arguments is written as it is, and compared as one that has none
    if text.strip() == "I add." and calls == [_call(CALLS[0])]:
        return {"role": "assistant", "content": SAID[0].removesuffix(END)}
    if text.strip() == "It is 5." and not calls:
        return {"role": "assistant", "content": SAID[1].removesuffix(END)}
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for _, n, a in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def _call(call: Any) -> tuple[Any, str, Any]:
    made = json.loads(call) if isinstance(call, str) else call
    function = made.get("function", made)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    return made.get("id"), function["name"], arguments


def _decoded(ids: Sequence[int]) -> str:
    tokenizer: Any = FAMILY.tokenizer()
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


DAMAGED = damaged_json(BODIES)
CONTROL = (*TEXTS[:12], END, "<tool_call>", "<|im_start|>system\nYou are", "\ufdd0", "é🙂")


def other_texts(rng: Random) -> bytes:
    """A request with other texts, and other ways to write what was said."""
    body = copy.deepcopy(rng.choice(BODIES))
    messages = body["messages"]
    for _ in range(rng.randint(1, 2)):
        message = rng.choice(messages)
        if message["role"] == "assistant":
            message["content"] = rng.choice((None, "", message["content"], [], "  ", "I add.\n"))
            message["refusal"], message["reasoning_content"] = None, rng.choice(("", "Hm.", None))
            if "tool_calls" in message and rng.random() < 0.5:
                given = rng.choice(('{"a":2,"b":3}', '{"a": 2}', {"a": 2, "b": 3}, '{"a":2,"a":3}'))
                message["tool_calls"] = [{**CALLS[0], "function": {**MADE, "arguments": given}}]
        else:
            text = rng.choice((ASKED["content"], MORE["content"], "5")) + rng.choice(CONTROL)
            message["content"] = rng.choice((text, [{"type": "text", "text": text}]))
    if rng.random() < 0.2:
        messages.insert(rng.randrange(len(messages)), copy.deepcopy(rng.choice(messages)))
    return json.dumps(body).encode()


def make(rng: Random) -> bytes:
    """A body damaged in its tree or its bytes, or with other texts."""
    return other_texts(rng) if rng.random() < 0.4 else DAMAGED(rng)


TARGET = Target("agent_calls", make, call, (Refused,), oracle)
