"""Targets find a border that lets something through: all of the wires, some of the readers."""

import importlib
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from checks.fuzz.engine import run_chunk
from checks.fuzz.targets import load_target
from megatron_opd.weight_sync import disk_messages

WORKERS, BRIDGE = "megatron_opd.data_workers", "sglang_bridge"
Break = Callable[[pytest.MonkeyPatch], None]


def without(module: str, name: str, result: Any = None) -> Break:
    """A border one of whose checks finds nothing."""

    def broken(monkeypatch: pytest.MonkeyPatch) -> None:
        owner, _, attribute = name.rpartition(".")
        found: Any = importlib.import_module(module)
        found = getattr(found, owner) if owner else found
        monkeypatch.setattr(found, attribute, lambda *given, **rest: result)

    return broken


def careless_taking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take whatever a worker gives."""

    def asked_key(address: str, missing: set[str], name: bytes, frames: Any) -> str:
        key = bytes(name).decode("utf-8", "replace")
        missing.discard(key)
        return key

    monkeypatch.setattr("checks.fuzz.targets.worker_samples.asked_key", asked_key)


def second_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin whatever comes, under whatever number."""
    from megatron_opd.data_workers.worker import Worker

    obey = Worker._obey

    async def careless(self: Worker, order: Any) -> bool:
        if getattr(order, "call", None) in self._calls and hasattr(order, "request"):
            self._begin(order)
            return True
        return await obey(self, order)

    monkeypatch.setattr(Worker, "_obey", careless)


def silent_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count nothing."""
    from sglang_bridge.refusals import Refusals

    monkeypatch.setattr(Refusals, "add", lambda self, reason: None)


def repeated_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """See no key twice."""
    from megatron_opd.data_workers import data_server

    monkeypatch.setattr(data_server, "set", list, raising=False)


def late_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the first token of a prompt."""
    from megatron_opd.data import examples

    made = examples.one_answer
    monkeypatch.setattr(examples, "one_answer", lambda prompt, response: made(prompt[1:], response))


def questions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn to write what users say."""
    from megatron_opd.data import chat_examples

    monkeypatch.setattr(chat_examples, "_answers_of", lambda chat, key: range(1, len(chat)))


def real_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what a pickle names for what it is."""
    from megatron_opd.checkpoint import stated_heads

    monkeypatch.setattr(stated_heads, "_Inert", pickle.Unpickler)


def trusted_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what an environment's process writes for what an environment may say."""
    from megatron_opd.environments import hosted

    async def step(self: Any, reply: Any) -> Any:
        return (await self._asked(hosted.StepAsk(reply))).answered

    monkeypatch.setattr(hosted._HostedEnvironment, "step", step)


def own_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count whatever reason an environment's process names."""
    from megatron_opd.environments import hosted
    from megatron_opd.environments.failed import EnvironmentFailed

    monkeypatch.setattr(hosted, "failure_told", EnvironmentFailed)


def lenient(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Read anything as the first thing that was read."""
    first = list[Any]()

    def read(*given: Any) -> Any:
        try:
            first.append(decode(*given))
        except (ValueError, msgspec.MsgspecError):
            if not first:
                raise
        return first[0]

    return read


def lenient_decoder(module: str, name: str) -> Break:
    def broken(monkeypatch: pytest.MonkeyPatch) -> None:
        found: Any = importlib.import_module(module)
        monkeypatch.setattr(found, name, lenient(getattr(found, name)))

    return broken


def lenient_disk_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    codec: Any = disk_messages._CODEC
    read = lenient(codec._decoder.decode)
    monkeypatch.setattr(codec, "_decoder", SimpleNamespace(decode=read))


def forgotten_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take histories for the same whatever tools they have."""
    from megatron_opd.environments.agent import branches

    monkeypatch.setattr(branches, "beginning", lambda chat: b"")


def any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every assistant's message for the one that was returned."""
    from megatron_opd.environments.agent import branches

    monkeypatch.setattr(branches, "reply_key", lambda message: "")


def loose_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take likeliest ids as they come."""
    from sglang_bridge.tables import RowTable

    def table(url: str, rows: Any, path_T: Any, logp_T: Any) -> RowTable:
        offsets_T1 = np.cumsum([0, *(len(ids_K) for _, ids_K in rows)], dtype=np.int64)
        logp_N = np.concatenate([logp_K for logp_K, _ in rows])
        ids_N = np.concatenate([ids_K for _, ids_K in rows])
        return RowTable(offsets_T1, ids_N, np.exp(logp_N), logp_N)

    for module in ("sglang", "openai"):
        monkeypatch.setattr(f"megatron_opd.teacher_apis.{module}.top_table", table)


CONTROLS: list[tuple[str, Break]] = [
    ("agent_calls", without("megatron_opd.environments.agent.call", "_check")),
    ("agent_calls", forgotten_tools),
    ("agent_calls", any_answer),
    ("worker_answers", without("megatron_opd.data_workers.pool", "generated_fault")),
    ("worker_answers", without("megatron_opd.data_workers.pool", "judged_fault")),
    ("worker_answers", without("megatron_opd.data_workers.pool", "scored_fault")),
    ("worker_answers", without("megatron_opd.data_workers.pool", "fetched_fault")),
    ("worker_answers", without("megatron_opd.data_workers.connections", "address_fault")),
    *(
        ("worker_turns", without("megatron_opd.data_workers.checks", name))
        for name in ("_layout_fault", "turns_fault", "_origin_fault", "_size_fault")
    ),
    ("worker_turns", without("megatron_opd.data_workers.pool", "fetched_fault")),
    ("worker_orders", without("megatron_opd.data_workers.store", "_check_ids")),
    ("worker_orders", second_calls),
    ("worker_orders", silent_garbage),
    ("worker_questions", repeated_keys),
    ("worker_samples", careless_taking),
    ("worker_samples", without("checks.fuzz.targets.worker_samples", "check_sizes")),
    ("worker_samples", without("checks.fuzz.targets.worker_samples", "check_batch")),
    ("work_requests", without("checks.fuzz.targets.work_requests", "check_score_params")),
    ("work_requests", without("checks.fuzz.targets.work_requests", "check_draw_params")),
    ("weight_shares", without("sglang_bridge.server.receiver", "_require_filled_once")),
    ("weight_manifests", without("sglang_bridge.weights.manifest", "_check_file")),
    ("weight_manifests", without("sglang_bridge.weights.manifest", "_check_array")),
    ("weight_messages", lenient_disk_messages),
    ("watch_queries", without("megatron_opd.watch.query", "whole", 10**9)),
    ("sft_pairs", without("megatron_opd.data.answers", "AnswerEncoder.ended")),
    ("sft_pairs", late_prompts),
    ("sft_pairs", questions_too),
    ("stated_heads", without("checks.fuzz.targets.stated_heads", "check_heads", ())),
    ("stated_heads", real_names),
    ("environment_answers", without("megatron_opd.environments.words", "_finite", float("nan"))),
    ("environment_answers", without("megatron_opd.environments.words", "_Left.take")),
    ("environment_answers", trusted_process),
    ("environment_answers", own_reasons),
    *(
        ("teacher_replies", without(f"megatron_opd.teacher_apis.{module}", name))
        for module, name in (
            ("sglang", "require_ours"),
            ("openai", "require_ours"),
            ("replies", "check_logp"),
        )
    ),
    ("teacher_replies", loose_tables),
    ("fleet_mail", lenient_decoder("megatron_opd.fleet.mailbox", "_taken")),
]


@pytest.mark.parametrize(
    ("name", "broken"), CONTROLS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CONTROLS)]
)
def test_a_border_that_lets_something_through_is_found(
    name: str, broken: Break, monkeypatch: pytest.MonkeyPatch
):
    target = load_target(name)
    broken(monkeypatch)
    tally = run_chunk(target, seed=11, chunk=0, count=600)
    assert tally.silent + tally.crashes > 0
