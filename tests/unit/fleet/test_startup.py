"""Student servers started elsewhere are held to weight_sync.match by what they say themselves."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opd.checkpoint.claimant import Claimant
from megatron_opd.config.schema import Config
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.errors import UserError
from megatron_opd.fleet import startup
from megatron_opd.fleet.startup import ServedModel, join_role, take_in
from megatron_opd.inputs.notes import sampler_gaps
from sglang_bridge.protocol import ServerEnds, ServerInfo
from tests.support.config_files import minimal
from tests.support.published import spec_of

MOE, DENSE = spec_of("Qwen3-30B-A3B"), spec_of("Qwen3-1.7B")
A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


def config_of(match: str, dtype: str = "bfloat16", cp: int = 1) -> Config:
    """A learner of tp 4, ep 4; student.tp and student.ep say nothing of servers elsewhere."""
    return minimal(
        student={"model": "s", "dtype": "bfloat16", "urls": [A, B]},
        learner={"dtype": dtype, "parallel": {"tp": 4, "ep": 4, "cp": cp}},
        weight_sync={"match": match},
    )


def told(url: str, tp: int, ep: int) -> ServerInfo:
    ends = ServerEnds((1,), (1,))
    return ServerInfo(url, "elsewhere", 9, 64, tp, ep, 0, "bfloat16", 1, False, ends=ends)


class Elsewhere:
    """A fleet, or a server, that says this of itself."""

    def __init__(self, *infos: ServerInfo) -> None:
        self.infos, self.added, self.closed = infos, [], False

    async def start(self, **_: object) -> tuple[ServerInfo, ...]:
        return self.infos

    async def info(self) -> ServerInfo:
        return self.infos[0]

    async def claim(self, claim: object) -> None: ...

    def add(self, client: object, info: ServerInfo) -> None:
        self.added.append(info)

    async def close(self) -> None:
        self.closed = True


def joined(config: Config, *infos: ServerInfo, spec: Any = MOE) -> list[str]:
    fleet: Any = Elsewhere(*infos)
    model = ServedModel(9, EndTokens((1,), 1), spec)
    return asyncio.run(join_role(config, "student", fleet, model, Claimant("run")))


@pytest.mark.parametrize(
    ("tp", "ep", "words"),
    [
        (8, 4, "learner.parallel.tp=4 and tp=8 of http://127.0.0.1:2"),
        (1, 1, "learner.parallel.tp=4 and tp=1 of http://127.0.0.1:2"),
        (4, 2, "learner.parallel.ep=4 and ep=2 of http://127.0.0.1:2"),
    ],
)
def test_a_server_that_is_cut_otherwise(tp: int, ep: int, words: str):
    """Before: it was used, whatever weight_sync.match said."""
    servers = told(A, 4, 4), told(B, tp, ep)
    with pytest.raises(UserError, match=f"weight_sync.match=require needs .* got {words}: "):
        joined(config_of("require"), *servers)
    first = joined(config_of("prefer"), *servers)[0]
    assert first.startswith(f"wider gap between learner and sampler: {words}: ")
    assert joined(config_of("off"), *servers) == []


def test_servers_that_are_cut_as_the_learner_join():
    for match in ("require", "prefer"):
        assert joined(config_of(match), told(A, 4, 4), told(B, 4, 4)) == []
    # a dense model has no experts to be divided
    assert joined(config_of("require"), told(A, 4, 1), spec=DENSE) == []
    # of a teacher's servers nothing is asked
    assert joined(config_of("require"), told(A, 8, 8), spec=None) == []


@pytest.mark.parametrize("new", [False, True])
def test_one_that_joins_later_is_held_to_it_too(new: bool, monkeypatch: pytest.MonkeyPatch):
    async def suits(*_: object) -> None: ...

    def let_in(match: str) -> tuple[Any, Any]:
        fleet, client = Elsewhere(), Elsewhere(told(B, 8, 4))
        monkeypatch.setattr(startup, "make_client", lambda *_: client)
        model = ServedModel(9, EndTokens((1,), 1), MOE)
        args: Any = (config_of(match), "student", fleet, B, None, model, Claimant("run"))
        try:
            asyncio.run(take_in(*args, suits if new else None))
        except UserError as error:
            return error, (fleet.added, client.closed)
        return None, (fleet.added, client.closed)

    error, after = let_in("require")
    assert "got learner.parallel.tp=4 and tp=8 of http://127.0.0.1:2: " in str(error)
    assert after == ([], True)
    error, (added, closed) = let_in("prefer")
    assert (error, len(added), closed) == (None, 1, False)


def test_what_the_configuration_says_is_judged_before_they_are_asked():
    lines = sampler_gaps(config_of("require"), MOE)
    assert len(lines) == 1
    assert lines[0].startswith("weight_sync.match require: the tp and ep of student.urls are comp")
    assert sampler_gaps(config_of("prefer"), MOE) == []
    for settings, words in (
        ({"dtype": "float32"}, "learner.dtype=float32 and student.dtype=bfloat16"),
        ({"cp": 2}, "learner.parallel.cp=2 and servers have 1"),
    ):
        with pytest.raises(UserError, match=words):
            sampler_gaps(config_of("require", **settings), MOE)


def test_a_run_tells_them_apart_by_the_student():
    """The run's own way in names the student's model, and no teacher's."""
    from megatron_opd.run.start import join

    said: list[str] = []
    spec: Any = SimpleNamespace(student=SimpleNamespace(spec=MOE), vocab_sizes={"student": 9})
    spec.ends = {"student": EndTokens((1,), 1)}
    run: Any = SimpleNamespace(
        config=config_of("prefer"), prepared=spec,
        directory=SimpleNamespace(claimant=Claimant("run")),
        used=lambda role: False, say=lambda *lines: said.extend(lines),
    )  # fmt: skip
    fleet: Any = Elsewhere(told(A, 8, 4), told(B, 4, 4))
    asyncio.run(join(run, "student", fleet))
    assert said[0].startswith("note: wider gap between learner and sampler: learner.parallel.tp=4")
    run.config = config_of("require")
    with pytest.raises(UserError, match=r"tp=8 of http://127\.0\.0\.1:1"):
        asyncio.run(join(run, "student", fleet))
