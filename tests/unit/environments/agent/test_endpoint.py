"""The real `openai` client speaks with the student, and what was sampled is what is trained on."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from megatron_opd.environments.play import Played
from tests.support.agent_calls import (
    ASKED,
    MORE,
    QWEN,
    Served,
    played,
)
from tests.support.chat_families import ADD

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
TOOL = {"role": "tool", "tool_call_id": "call00000", "content": "5"}


def branches(found: Played) -> list[str]:
    return [turn.branch for turn in found.turns]


def test_an_agent_with_a_tool_extends_one_sequence():
    async def agent(at: Served):
        first = await at.said(ASKED, tools=[ADD])
        second = await at.said([*ASKED, first, TOOL], tools=[ADD])
        return first, second

    (first, second), found = played(agent, THOUGHT + CALL, THOUGHT + "5<|im_end|>")
    (call,) = first.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    assert (first.content, first.reasoning_content) == (None, "Hm.")
    assert (second.content, second.tool_calls) == ("5", None)
    assert (found.reward, found.answer, found.ended) == (1.0, "5", "done")
    assert [turn.num_calls for turn in found.turns] == [1, 0]
    (ids,) = found.trajectory.sequences
    text = QWEN.tokenizer().decode(ids)
    begun = text.index("<|im_start|>user\nHow much")
    assert text[begun:] == (
        "<|im_start|>user\nHow much is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
        + (THOUGHT + CALL)
        + "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n" + THOUGHT + "5<|im_end|>"
    )


def echoes() -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """How clients write back the answer that they were given."""

    def arguments(message: dict[str, Any], text: str) -> dict[str, Any]:
        (call,) = message["tool_calls"]
        function = {**call["function"], "arguments": text}
        return {**message, "tool_calls": [{**call, "function": function}]}

    return {
        "as it is": lambda m: m,
        "without thought": lambda m: {n: v for n, v in m.items() if n != "reasoning_content"},
        "other order, no space": lambda m: arguments(m, '{"b":3,"a":2}'),
        "numbers of JavaScript": lambda m: arguments(m, '{"a": 2.0, "b": 3.0}'),
        "arguments as an object": lambda m: arguments(m, {"a": 2, "b": 3}),  # type: ignore[arg-type]
        "content empty": lambda m: {**m, "content": ""},
        "content absent": lambda m: {n: v for n, v in m.items() if n != "content"},
        "content as parts": lambda m: {**m, "content": [{"type": "text", "text": ""}]},
        "space around": lambda m: {**m, "content": "\n "},
        "what nobody said": lambda m: {**m, "refusal": None, "annotations": [], "audio": None},
    }


def test_an_answer_that_a_client_writes_otherwise_is_the_same():
    async def agent(at: Served):
        tools = json.loads(json.dumps([ADD], sort_keys=True))
        for client, echo in echoes().items():
            asked = [{"role": "system", "content": client}, *ASKED]
            first = (await at.said(asked, tools=[ADD])).model_dump(exclude_none=True)
            answered = {**TOOL, "tool_call_id": first["tool_calls"][0]["id"]}
            at.sampler.turns.append("5<|im_end|>")
            await at.said([*asked, echo(first), answered], tools=tools)
            at.sampler.turns.append(THOUGHT + CALL)

    _, found = played(agent, THOUGHT + CALL)
    seconds = dict(zip(echoes(), branches(found)[1::2], strict=True))
    assert set(seconds.values()) == {""}, seconds
    assert len(found.trajectory.sequences) == len(echoes())


def edits() -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """The control: what makes another history of it."""
    return {
        "another value": lambda m: (
            echoes()["other order, no space"](m)
            | {
                "tool_calls": [
                    {**m["tool_calls"][0], "function": {"name": "add", "arguments": "{}"}}
                ]
            }
        ),
        "another id": lambda m: {**m, "tool_calls": [{**m["tool_calls"][0], "id": "call00001"}]},
        "another text": lambda m: {**m, "content": "I add."},
        "no calls": lambda m: {"role": "assistant", "content": "5"},
    }


def test_another_history_is_another_sequence():
    async def agent(at: Served):
        first = (await at.said(ASKED, tools=[ADD])).model_dump(exclude_none=True)
        for edit in edits().values():
            await at.said([*ASKED, edit(first), MORE], tools=[ADD])

    _, found = played(agent, THOUGHT + CALL)
    assert branches(found) == ["", *["new"] * len(edits())]
    assert len(found.trajectory.sequences) == 1 + len(edits())


def test_edited_histories_keep_the_ids_of_answers_that_stay():
    """The middle one of three turns is rewritten; the others stay as they were sampled."""

    async def agent(at: Served):
        messages = [*ASKED]
        for _ in range(3):
            messages += [await at.said(messages), MORE]
        edited = [*messages]
        edited[3] = {"role": "assistant", "content": "I forgot."}
        await at.said(edited)
        # the same question with another system prompt: what a sub-agent is
        await at.said([{"role": "system", "content": "Be short."}, *ASKED])
        await at.said(messages)  # the first sequence goes on

    turns = [f"the tool{n} says<|im_end|>" for n in range(3)]
    _, found = played(agent, *turns)
    assert branches(found) == ["", "", "", "edited", "new", ""]
    first, edited, new = (ids.tolist() for ids in found.trajectory.sequences)
    sampled = [QWEN.ids(turn)[:-1] for turn in turns]
    assert [holds(edited, ids) for ids in sampled] == [True, False, True]
    assert [holds(first, ids) for ids in sampled] == [True] * 3
    assert "I forgot." in QWEN.tokenizer().decode(edited)
    assert "Be short." in QWEN.tokenizer().decode(new)


def holds(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


def test_sampled_ids_are_not_encoded_again_where_they_would_come_out_otherwise():
    """The turn's text has shorter ids; the control finds the shorter ones in no sequence."""
    split = [i for letter in "tool" for i in QWEN.ids(letter)]
    assert len(split) > len(QWEN.ids("tool"))

    async def agent(at: Served):
        sampled = [*split, *QWEN.ids("<|im_end|>")]
        at.sampler.turns_of_ids = [sampled]
        first = await at.said(ASKED)
        await at.said([*ASKED, first, MORE])
        await at.said([{"role": "user", "content": "Other."}, first, MORE])
        return first

    first, found = played(agent)
    assert first.content == "tool"
    assert branches(found) == ["", "", "edited"]
    for ids in found.trajectory.sequences:
        assert holds(ids.tolist(), split)
        assert not holds(ids.tolist(), QWEN.ids("tool"))


def test_parallel_calls_are_siblings_and_a_retry_is_one_too():
    async def agent(at: Served):
        first = await at.said(ASKED)
        asked = [*ASKED, first, MORE]
        await asyncio.gather(*(at.said(asked) for _ in range(4)))
        answers = await asyncio.gather(*(at.said([*ASKED, MORE]) for _ in range(2)))
        again = await asyncio.gather(*(at.said([*ASKED, MORE, a, MORE]) for a in answers))
        return len(again)

    _, found = played(agent, seed=3)
    causes = branches(found)
    assert sorted(causes) == sorted(["", "", *["sibling"] * 3, "new", "sibling", "", ""])
    assert len(found.trajectory.sequences) == 6
    runs = found.trajectory.runs
    assert [run.turn for run in runs] != sorted(run.turn for run in runs), "they overtook"


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_says_the_same(usage: bool):
    async def agent(at: Served):
        options = {"stream_options": {"include_usage": True}} if usage else {}
        made: Any = at.client.chat.completions
        stream = await made.create(
            model="student", messages=ASKED, tools=[ADD], stream=True, **options
        )
        return [chunk async for chunk in stream]

    chunks, found = played(agent, THOUGHT + "I add. " + CALL)
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(each.delta.content or "" for each in deltas).strip() == "I add."
    thoughts = [getattr(each.delta, "reasoning_content", None) or "" for each in deltas]
    assert "".join(thoughts) == "Hm."
    (call,) = [call for each in deltas for call in each.delta.tool_calls or ()]
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert [each.finish_reason for each in deltas] == [*[None] * (len(deltas) - 1), "tool_calls"]
    totals = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(totals) == usage
    assert all(t.completion_tokens == found.trajectory.num_sampled for t in totals)


def test_usage_stop_and_the_length_of_an_answer():
    async def agent(at: Served):
        made: Any = at.client.chat.completions
        whole = await made.create(model="student", messages=ASKED, stop=["three", "say"])
        cut = await made.create(model="student", messages=ASKED, max_completion_tokens=2)
        again = await at.said([*ASKED, whole.choices[0].message, MORE])
        return whole, cut, again, at.sampler.stops

    text = "the tool says that<|im_end|>"
    (whole, cut, _, stops), found = played(agent, text, text)
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == ("the tool", "stop")
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)
    assert stops == [("three", "say"), (), ()]
    sampled = QWEN.ids(text)
    assert whole.usage.completion_tokens == len(sampled)
    assert whole.usage.prompt_tokens == found.trajectory.runs[0].start
    assert whole.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens // 2
    assert branches(found) == ["", "sibling", ""]
    assert found.ended == "done", "the agent's own limit ends nothing"


def test_a_call_that_cannot_be_read_stays_text():
    broken = ["{x}", '{"name": "sub", "arguments": {}}', '{"name": "add", "arguments": [1]}']
    infinite = '{"name": "add", "arguments": {"a": 1e999, "b": 1}}'
    turns = [f"<tool_call>\n{call}\n</tool_call><|im_end|>" for call in (*broken, infinite)]
    wrong = '<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call><|im_end|>'

    async def agent(at: Served):
        return [await at.said(ASKED, tools=[ADD]) for _ in range(len(turns) + 1)]

    said, found = played(agent, *turns, wrong)
    assert [m.content for m in said[:-1]] == [t.removesuffix("<|im_end|>") for t in turns]
    assert all(m.tool_calls is None for m in said[:-1])
    assert json.loads(said[-1].tool_calls[0].function.arguments) == {"a": "x"}, (
        "the agent's to judge"
    )
    assert [turn.num_call_errors for turn in found.turns] == [1] * 5


def test_with_tool_choice_none_there_are_no_tools():
    async def agent(at: Served):
        return await at.said(ASKED, tools=[ADD], tool_choice="none")

    said, found = played(agent, CALL)
    assert said.tool_calls is None
    assert "tools" not in QWEN.tokenizer().decode(found.trajectory.sequences[0])


def test_the_models_are_the_student():
    async def agent(at: Served):
        listed = [model.id async for model in at.client.models.list()]
        one = await at.client.models.retrieve("student")
        await at.said(ASKED)
        with pytest.raises(openai.NotFoundError):
            await at.client.models.retrieve("teacher")
        return [*listed, one.id]

    assert played(agent)[0] == ["student", "student"]


NAMED = {"type": "function", "function": {"name": "add"}}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}
NO_SCHEMA = {"type": "function", "function": {"name": "a", "parameters": {"type": 7}}}
REFUSED = {
    "gpt-4o": {"model": "gpt-4o"},
    'tool_choice must be "auto" or "none", got \'required\'': {"tool_choice": "required"},
    'tool_choice must be "auto" or "none", got {': {"tool_choice": NAMED, "tools": [ADD]},
    "tool 'add' must not be strict": {"tools": [STRICT]},
    "response_format": {"response_format": {"type": "json_object"}},
    "n must be 1": {"n": 2},
    "logprobs": {"logprobs": True},
    "logit_bias": {"logit_bias": {"5": 1}},
    "presence_penalty": {"presence_penalty": 0.5},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "'top_k' is not served": {"extra_body": {"top_k": 5}},
    "stop must be": {"stop": ["a"] * 5},
    "max_tokens": {"max_tokens": 0},
    "'functions' is not served": {"functions": [{"name": "add"}]},
    "'image_url'; only text": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "'wizard'": {"messages": [{"role": "wizard", "content": "x"}]},
    "no messages": {"messages": []},
    "end with the user's": {"messages": [*ASKED, {"role": "assistant", "content": "It is"}]},
    "a system message": {"messages": [*ASKED, {"role": "system", "content": "x"}, *ASKED]},
    "no JSON schema": {"tools": [NO_SCHEMA]},
    "is empty": {"messages": [{"role": "user", "content": ""}]},
}


def test_what_no_turn_can_do_is_refused_by_name():
    """And the trajectory goes on."""

    async def agent(at: Served):
        errors: dict[str, Any] = {}
        for word, keys in REFUSED.items():
            asked: dict[str, Any] = {"model": "student", "messages": ASKED, **keys}
            with pytest.raises(openai.APIStatusError) as caught:
                await at.client.chat.completions.create(**asked)
            errors[word] = caught.value
        await at.said(ASKED)
        return errors

    errors, found = played(agent)
    for word, error in errors.items():
        kind = openai.NotFoundError if word == "gpt-4o" else openai.BadRequestError
        assert isinstance(error, kind)
        assert error.type == "invalid_request_error"
        assert word in error.body["message"]
    assert len(found.turns) == 1


def test_the_runs_sampling_is_used_and_what_differs_is_counted():
    async def agent(at: Served):
        await at.said(ASKED, temperature=0.2, top_p=1, seed=4, user="me", n=1, logprobs=False)
        await at.said(ASKED, temperature=1, frequency_penalty=0, parallel_tool_calls=True)

    _, found = played(agent)
    assert [turn.ignored for turn in found.turns] == [2, 0]


async def raw(at: Served, key: str) -> httpx.Response:
    content = json.dumps({"model": "student", "messages": ASKED})
    headers = {b"Authorization": b"Bearer " + key.encode("latin-1")}
    async with httpx.AsyncClient(headers=headers, verify=False) as client:
        return await client.post(f"{at.endpoint.base_url}/chat/completions", content=content)


def test_keys_are_of_one_trajectory_and_end_with_it():
    async def agent(at: Served):
        await at.said(ASKED)
        wrong = [at.key[:-1] + ("0" if at.key[-1] != "0" else "1"), at.key + "0", "x"]
        number = at.key.replace("opd-0-", "opd-7-")
        found = [(await raw(at, key)).status_code for key in (*wrong, number, "opd-é-x")]
        other = at.endpoint._seal("7")
        ended = await raw(at, f"opd-7-{other}")
        return found, ended.status_code, ended.json()["error"]["code"]

    (found, ended, code), _ = played(agent)
    assert found == [401] * 5
    assert (ended, code) == (410, "trajectory_ended")


def test_an_ended_trajectory_answers_no_more():
    async def agent(at: Served):
        await at.said(ASKED)
        await at.trajectory.close()
        with pytest.raises(openai.APIStatusError) as caught:
            await at.said(ASKED)
        return caught.value.status_code

    assert played(agent)[0] == 410


def test_garbage_is_refused_in_openais_shape():
    async def agent(at: Served):
        await at.said(ASKED)
        url, key = at.endpoint.base_url, {"Authorization": f"Bearer {at.key}"}
        async with httpx.AsyncClient(headers=key) as client:
            replies = [
                await client.post(f"{url}/chat/completions", content=body)
                for body in (b"", b"[]", b"{", b'{"n": NaN}', b'{"n": 1e999}', b"\xff", b"[" * 9999)
            ]
            double = b'{"model": "student", "model": "student", "messages": []}'
            replies.append(await client.post(f"{url}/chat/completions", content=double))
            replies.append(await client.post(f"{url}/chat/completions", content=b"x" * 2**21))
            replies.append(await client.get(f"{url}/chat/completions"))
            replies.append(await client.post(f"{url}/embeddings", content=b"{}"))
        return replies

    replies, found = played(agent)
    assert [each.status_code for each in replies] == [*[400] * 8, 413, 405, 404]
    assert all(each.json()["error"]["message"] for each in replies)
    assert len(found.turns) == 1


def test_a_client_that_leaves_loses_no_turn():
    """Its turn is sampled to its end and recorded; what it asks again is a sibling."""
    held = asyncio.Event()

    async def agent(at: Served):
        made: Any = at.client.with_options(timeout=0.2).chat.completions
        with pytest.raises(openai.APITimeoutError):
            await made.create(model="student", messages=ASKED)
        held.set()
        stream = await at.client.chat.completions.create(
            model="student", messages=ASKED, stream=True
        )
        await stream.close()
        await at.said(ASKED)

    _, found = played(agent, held=held)
    assert branches(found) == ["", "sibling", "sibling"]


def test_history_branch_goes_on_as_the_template_writes_it():
    async def agent(at: Served):
        first = await at.said(ASKED)
        second = await at.said([*ASKED, first, MORE])
        await at.said([*ASKED, first, MORE, second, MORE])

    _, found = played(agent, THOUGHT + "5<|im_end|>", "6<|im_end|>", history="branch")
    assert branches(found) == ["", "rewritten", ""]
    assert "Hm." not in QWEN.tokenizer().decode(found.trajectory.sequences[1])
