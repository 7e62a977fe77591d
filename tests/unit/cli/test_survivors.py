"""Servers that a run can go on without, and those that it cannot."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opd.cli.survivors import Survivors
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from tests.support.config_files import minimal

A, B, C, T = (f"http://{name}:1" for name in "abct")


def survivors(**student: Any) -> tuple[Survivors, dict[str, Fleet], list[str], list[str]]:
    def fleet(*urls: str) -> Fleet:
        return Fleet([ServerClient(url, timeout_s=1) for url in urls])

    said: list[str] = []
    discarded: list[str] = []
    run = student.pop("run", {})
    fleets = {"student": fleet(A, B, C), "teacher": fleet(T)}
    processes: Any = SimpleNamespace(discard=discarded.append)
    buffer = {"max_staleness": 1, "hold_batches": 1}
    config = minimal(student={"model": "s"} | student, run=run, buffer=buffer)
    return Survivors(config, fleets, processes, said.append), fleets, said, discarded


def test_servers_are_lost_until_too_few_are_left():
    lost, fleets, said, discarded = survivors(min_servers=2)
    assert lost.lose(B, "it was killed")
    assert lost.lose(B, "again"), "whoever notices it next"
    assert fleets["student"].urls == (A, C)
    assert not lost.lose(A, "killed too")
    assert fleets["student"].urls == (A, C)
    assert (lost.lost, discarded) == ({B: "it was killed"}, [B])
    assert said == [f"student server {B} is lost, the run goes on with 2: it was killed"]


def test_a_role_s_only_server_is_needed():
    lost, fleets, said, _ = survivors()
    assert not lost.lose(T, "killed")
    assert (fleets["teacher"].urls, said) == ((T,), [])


def test_a_server_of_two_roles_must_be_spared_by_both():
    lost, fleets, said, _ = survivors()
    fleets["teacher"] = Fleet([ServerClient(A, timeout_s=1)])
    assert not lost.lose(A, "killed")
    fleets["teacher"] = Fleet([ServerClient(url, timeout_s=1) for url in (A, T)])
    assert lost.lose(A, "killed")
    assert (fleets["student"].urls, fleets["teacher"].urls) == ((B, C), (T,))
    assert len(said) == 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_needs_every_server(deterministic: bool):
    lost, *_ = survivors(run={"deterministic": deterministic})
    assert lost.lose(B, "killed") is not deterministic
    asyncio.run(asyncio.sleep(0))
