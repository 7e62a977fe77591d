"""A rogue server's replies: every one is refused with BadReply, and nothing else is raised."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sglang_bridge import wire
from sglang_bridge.arrays import U2, pack
from sglang_bridge.errors import BadReply, RankFailed, RequestAborted
from sglang_bridge.parse import (
    Known,
    parse_done,
    parse_expected,
    parse_info,
    parse_pieces,
    parse_rollout,
    parse_scores,
)
from sglang_bridge.parse import parse_version as read_version
from sglang_bridge.protocol import RolloutRequest
from tests.support.bridge_replies import (
    REQUEST,
    SELECT_REQUEST,
    URL,
    draws_payload,
    packed,
    rollout_reply,
    score_reply,
    selection_payload,
)

PLAIN = RolloutRequest(rid="r", input_ids=[1, 2], max_new_tokens=3)
KNOWN = Known(vocab_size=50, context_length=64, version=3)
HUGE = 10**400


def plain(**changes: Any) -> dict[str, Any]:
    """A reply without a cache; `spans`, `reason` and `cached` lie in its meta_info."""
    reply = rollout_reply({})
    keys = {"spans": "weight_versions", "reason": "finish_reason", "cached": "cached_tokens"}
    for name, key in keys.items():
        if name in changes:
            reply["meta_info"][key] = changes.pop(name)
    ids = changes.get("output_ids")
    if isinstance(ids, list):
        changes["output_ids"] = pack(np.array(ids))
    return reply | changes


def span(version: Any, start: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "end": 3}


def test_a_sound_plain_reply_is_read():
    reply = parse_rollout(URL, plain(), PLAIN, KNOWN)
    assert (reply.output_ids_T.tolist(), reply.spans) == ([5, 9, 5], ((3, 0, 3),))
    assert reply.cached_tokens == 1
    longest = plain(output_ids=[49] * 3, reason={"type": "length"})
    assert parse_rollout(URL, longest, PLAIN, KNOWN).finish_reason == "length"


def test_a_stop_string_is_told_from_an_end_token():
    asked = replace(PLAIN, stop=("end", "\n"))
    by_string = plain(reason={"type": "stop", "matched": "\n"})
    assert parse_rollout(URL, by_string, asked, KNOWN).finish_reason == "stop_string"
    by_token = plain(reason={"type": "stop", "matched": 5})
    assert parse_rollout(URL, by_token, asked, KNOWN).finish_reason == "stop"
    with pytest.raises(BadReply, match=r"stopped at '\\n', which was not asked for"):
        parse_rollout(URL, by_string, PLAIN, KNOWN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_ids": [5, -1, 5]}, "output_ids holds -1"),
        ({"output_ids": [5, 50, 5]}, "output_ids holds 50, the vocabulary has 50"),
        ({"output_ids": [5, 2**31 - 1, 5]}, "output_ids holds 2147483647"),
        ({"output_ids": [5, 9.0, 5]}, "output_ids: expected whole numbers"),
        ({"output_ids": "595"}, "output_ids: expected bytes, got str"),
        ({"output_ids": (5, 9, 5)}, "output_ids: expected bytes, got tuple"),
        ({"output_ids": U2 + b"123"}, "3 bytes are not a whole number of 2-byte items"),
        ({"output_ids": b"u"}, "output_ids: expected whole numbers"),
        ({"output_ids": [5] * 4}, "asked for at most 3 tokens, got 4"),
        ({"output_ids": [5] * 2, "reason": {"type": "length"}}, "'length' after 2 of 3 tokens"),
        ({"spans": [span("99999", 0)]}, "version 99999 was not synced yet, 3 was"),
        ({"spans": [span("-9", 0)]}, "weight version '-9' is not a number"),
        ({"spans": [span("1.5", 0)]}, "is not a number"),
        ({"spans": [span("٣", 0)]}, "is not a number"),
        ({"spans": [span("9" * 5000, 0)]}, "is not a number"),
        ({"spans": [span(3, 0)]}, "version is missing or no str"),
        ({"spans": [span("3", 0), span("2", 1)]}, r"versions fall: \[3, 2\]"),
        ({"spans": [span("3", None)]}, "start must be a whole number"),
        ({"spans": [span("3", False)]}, "start must be a whole number"),
        ({"spans": [span("3", -1)]}, "start must be a whole number"),
        ({"spans": [span("3", HUGE)]}, "start must be a whole number"),
        ({"spans": [span("3", 1)]}, "do not cover 3 tokens"),
        ({"spans": ["3"]}, "version is missing"),
        ({"spans": []}, "no versions"),
        ({"reason": {"type": ["stop"]}}, "finish_reason is"),
        ({"reason": None}, "finish_reason is missing"),
        ({"cached": None}, "cached_tokens must be a whole number >= 0, got None"),
        ({"cached": -1}, "cached_tokens must be a whole number >= 0, got -1"),
        ({"cached": 2}, "had 2 of 2 input_ids in its cache"),
    ],
)
def test_plain_replies_are_checked_as_closely(changes: dict[str, Any], message: str):
    with pytest.raises(BadReply, match=message) as caught:
        parse_rollout(URL, plain(**changes), PLAIN, KNOWN)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1000


def test_the_end_of_the_context_ends_a_response_too():
    cut = plain(output_ids=[5, 9], reason={"type": "length"})
    near = replace(PLAIN, input_ids=list(range(60)))
    assert len(parse_rollout(URL, cut, near, KNOWN).output_ids_T) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids_N": [5, 7, 9, 2, 5, 50]}, "id 50 is not of the vocabulary of 50"),
        ({"num_draws": 4.0}, "asked for num_draws=4, got 4.0"),
        ({"num_atoms": False}, "asked for num_atoms=0, got False"),
        ({"versions": [["4", 0]]}, "version 4 was not synced yet, 3 was"),
        ({"versions": [["3", 0], ["2", 1]]}, "versions fall"),
        ({"versions": [["3"]]}, "versions are no pairs"),
        ({"versions": ["30"]}, "versions are no pairs"),
        ({"versions": [["3", None]]}, "versions are no pairs"),
        ({"versions": [["3", 0.0]]}, "versions are no pairs"),
        ({"versions": {"3": 0}}, "no versions"),
        ({"versions": [[None, 0]]}, "is not a number"),
        ({"ids_N": "é"}, "ids_N"),
    ],
)
def test_caches_too(change: dict[str, Any], message: str):
    arrays = {name: value for name, value in change.items() if name in wire.DRAW_FIELDS}
    good = draws_payload() | {"versions": [["3", 0]]}
    lists = {name: value for name, value in arrays.items() if isinstance(value, list)}
    payload = good | change | packed(lists)
    with pytest.raises(BadReply, match=message):
        parse_rollout(URL, rollout_reply(payload), REQUEST, KNOWN)


def test_a_selection_is_of_the_vocabulary():
    reply = score_reply([-1, -2.5, -0.25], selection_payload())
    parse_scores(URL, reply, SELECT_REQUEST, KNOWN)
    with pytest.raises(BadReply, match="id 30 is not of the vocabulary of 30"):
        parse_scores(URL, reply, SELECT_REQUEST, Known(vocab_size=30))


EXPERTS = {"layers": 2, "topk": 1, "num_experts": 4}


@pytest.mark.parametrize(
    "change",
    [
        {"layers": -2, "topk": -1},
        {"layers": 10**30},
        {"layers": True},
        {"num_experts": 0},
        {"num_experts": -1},
        {"num_experts": 10**9},
        {"topk": 1.0},
        {"experts": None},
    ],
)
def test_impossible_experts(change: dict[str, Any]):
    request = replace(REQUEST, experts=True)
    flat = pack(np.zeros(2 * 5, dtype="<u1"))

    def reply(**fields: Any) -> dict[str, Any]:
        made = rollout_reply()
        made["meta_info"][wire.PAYLOAD][0][wire.EXPERTS] = {**EXPERTS, "experts": flat, **fields}
        return made

    assert parse_rollout(URL, reply(), request).experts_XLk.shape == (5, 2, 1)
    with pytest.raises(BadReply):
        parse_rollout(URL, reply(**change), request)


RANK = {"checksums": {"a.b|1|4|2|float32": "00ff"}, "parallelism_info": [{"tp_rank": 1}]}


def described(answers: dict[str, Any]) -> dict[str, Any]:
    """The reply of a server of one rank to an action of the plugin."""
    return {"ranks": [{"checksums": answers, "parallelism_info": []}]}


INFO = {
    "server": {
        "tp_size": 2,
        "ep_size": 2,
        "max_total_num_tokens": 99,
        "enable_deterministic_inference": True,
    },
    "model": {"model_path": "m", "weight_version": "3"},
    "models": {"data": [{"max_model_len": 64}]},
    "plugin": described(
        {
            **{"vocab_size": "512", "dtype": "bfloat16", "quantization": "int8"},
            "ends": '{"model": [1], "tokenizer": [1]}',
        }
    ),
}
SOUND = {"vocab_size": "5", "dtype": "x", "quantization": "none"}


@pytest.mark.parametrize(
    ("key", "digest"),
    [
        ("a|x|0|1|float32", "00"),
        ("a|1|-4|1|float32", "00"),
        ("a|1|²|1|float32", "00"),
        ("a|" + "9" * 5000 + "|0|1|float32", "00"),
        ("a\x1b[2J|1|0|1|float32", "00"),
        ("a|1|0|1|float32", 7),
        ("a|1|0|1|float32", "00\n"),
        ("a|1|0|1|float32", "0" * 17),
    ],
)
def test_impossible_pieces(key: str, digest: Any):
    with pytest.raises(BadReply) as caught:
        parse_pieces(URL, described({key: digest}))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("plugin", described({"vocab_size": "0", "dtype": "x", "quantization": "none"})),
        ("plugin", described({"vocab_size": "-5", "dtype": "x", "quantization": "none"})),
        ("plugin", described({"dtype": "x", "quantization": "none"})),
        ("plugin", described({"vocab_size": "9" * 12, "dtype": "x", "quantization": "none"})),
        ("plugin", described({"vocab_size": "5", "dtype": "x\x1b[", "quantization": "none"})),
        ("plugin", described({"vocab_size": "5", "dtype": "x"})),
        ("plugin", described({"vocab_size": "5", "dtype": "x", "quantization": "int4"})),
        ("plugin", described(SOUND)),
        ("plugin", described(SOUND | {"ends": "[1]"})),
        ("plugin", described(SOUND | {"ends": '{"model": ["1"], "tokenizer": null}'})),
        ("plugin", described(SOUND | {"ends": "[" * 5000})),
        ("server", {"tp_size": True}),
        ("server", {"tp_size": 0}),
        ("server", {"max_total_num_tokens": HUGE}),
        ("model", {"model_path": "/m\x1b]0;evil\x07"}),
        ("model", {"weight_version": "default"}),
        ("model", {"weight_version": None}),
        ("models", {"data": [{"max_model_len": -1}]}),
    ],
)
def test_impossible_descriptions(section: str, change: dict[str, Any]):
    parse_info(URL, **INFO)
    with pytest.raises(BadReply) as caught:
        parse_info(URL, **(INFO | {section: INFO[section] | change}))
    assert str(caught.value).isprintable()


def of_ranks(*answers: dict[str, Any], ranks: list[Any] | None = None) -> dict[str, Any]:
    """The reply of a server's ranks to an action of the plugin."""
    numbers = list(range(len(answers))) if ranks is None else ranks
    return {
        "ranks": [
            {"checksums": said, "parallelism_info": [{"tp_rank": rank}]}
            for said, rank in zip(answers, numbers, strict=True)
        ]
    }


def size(value: Any) -> dict[str, Any]:
    return {wire.RECEIVED_BYTES: value}


def test_bytes_that_ranks_expect_are_in_rank_order():
    assert parse_expected(URL, of_ranks(size("7"), size("300"), ranks=[1, 0])) == [300, 7]
    assert parse_expected(URL, described(size(8))) == [8]
    parse_done(URL, of_ranks({}, {}))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (of_ranks(size("-1")), "bytes to receive '-1' is not a number"),
        (of_ranks(size("1.5")), "'1.5' is not a number"),
        (of_ranks(size("9" * 16)), "is not a number"),
        (of_ranks(size("9" * 5000)), "is not a number"),
        (of_ranks(size(HUGE)), "is not a number"),
        (of_ranks(size(True)), "bytes to receive True is not a number"),
        (of_ranks(size(None)), "bytes to receive None is not a number"),
        (of_ranks(size([7])), "is not a number"),
        (of_ranks(size("\x1b[2J")), "is not a number"),
        (of_ranks({}), "bytes to receive None"),
        (of_ranks(), "no rank answered: is the server's plugin active"),
        ({}, "ranks is missing"),
        (None, "ranks is missing"),
        ({"ranks": None}, "ranks is missing"),
        ({"ranks": [None]}, "checksums is missing"),
        ({"ranks": [{"checksums": size("1")}]}, "parallelism_info is missing"),
        ({"ranks": [{"checksums": [], "parallelism_info": []}]}, "checksums is missing"),
        ({"ranks": [{"checksums": size("1"), "parallelism_info": [7]}]}, "tp_rank must be"),
        (of_ranks(size("1"), ranks=[-1]), "tp_rank must be a whole number"),
        (of_ranks(size("1"), ranks=[True]), "tp_rank must be a whole number"),
        # before: one of them was lost
        (of_ranks(size("1"), size("2"), ranks=[0, 0]), r"ranks \[0, 0\] answered"),
        (of_ranks(size("1"), size("2"), ranks=[0, 2]), r"ranks \[0, 2\] answered"),
        (of_ranks(size("2"), ranks=[1]), r"ranks \[1\] answered"),
    ],
)
def test_impossible_expectations(reply: Any, message: str):
    with pytest.raises(BadReply, match=message) as caught:
        parse_expected(URL, reply)
    assert str(caught.value).startswith(URL)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1000


@pytest.mark.parametrize("parse", [parse_expected, parse_done, parse_pieces])
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("BadExpectation: a is not filled", "BadExpectation: a is not filled"),
        ("a\nb\x1b[2J\u202e", r"a b\\x1b\[2J\\u202e"),
        ("long " * 9000, "long long"),
        (None, "None"),
        ({"deep": [1]}, r"\{'deep': \[1\]\}"),
    ],
)
def test_a_rank_that_failed_is_named_whatever_it_says(
    parse: Callable[..., Any], said: Any, shown: str
):
    reply = of_ranks(size("1"), {wire.ERROR: said})
    with pytest.raises(RankFailed, match=f"^{URL} rank 1: {shown}") as caught:
        parse(URL, reply)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1000


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 70),
        st.sampled_from([HUGE, -(2**31), 2**31, 2**63, 1e308, float("nan"), float("inf"), 0.5]),
        st.text(max_size=6),
        st.sampled_from(["3", "stop", "length", "r", "AAAA", "\x1b[2J", "\u202e", "é", "\ud800"]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def places(tree: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value inside a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


def damaged(data: st.DataObject, tree: Any) -> Any:
    """A copy of `tree` in which up to three values are something else."""
    tree = {"root": copy.deepcopy(tree)}
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(places(tree)))
        inner = tree
        for key in way:
            inner = inner[key]
        inner[last] = data.draw(JSON)
    return tree["root"]


REPLIES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "plain": (plain(), lambda reply: parse_rollout(URL, reply, PLAIN, KNOWN)),
    "cache": (
        rollout_reply(draws_payload() | {"versions": [["2", 0], ["3", 2]]}),
        lambda reply: parse_rollout(URL, reply, REQUEST, KNOWN),
    ),
    "scores": (
        score_reply([-1, -2.5, -0.25], selection_payload()),
        lambda reply: parse_scores(URL, reply, SELECT_REQUEST, KNOWN),
    ),
    "pieces": ({"ranks": [RANK]}, lambda reply: parse_pieces(URL, reply)),
    "expected": (of_ranks(size("1"), size("2")), lambda reply: parse_expected(URL, reply)),
    "done": (of_ranks({}, {}), lambda reply: parse_done(URL, reply)),
    "info": (INFO, lambda reply: parse_info(URL, *info_parts(reply))),
    "version": (INFO["model"], lambda reply: read_version(URL, reply)),
}


def info_parts(reply: Any) -> list[Any]:
    whole = reply if isinstance(reply, dict) else {}
    return [whole.get(name) for name in INFO]


@pytest.mark.parametrize("kind", REPLIES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_reply_is_whole_or_a_bad_reply(kind: str, data: st.DataObject):
    good, parse = REPLIES[kind]
    try:
        read = parse(damaged(data, good))
    except (BadReply, RankFailed, RequestAborted) as error:
        said = str(error)
        sound = said.isprintable() and len(said) <= 1000
    else:
        sound = is_sound(read)
    assert sound


def is_sound(read: Any) -> bool:
    """Whether what was read of a reply is what the pipeline may use."""
    ids_T = getattr(read, "output_ids_T", None)
    if ids_T is None:
        return True
    inside = 0 < len(ids_T) <= REQUEST.max_new_tokens and 0 <= ids_T.min() <= ids_T.max() < 50
    versions = [version for version, _, _ in read.spans]
    return inside and versions == sorted(versions) and versions[0] >= 0 and versions[-1] <= 3
