"""Teachers that follow are synced before the student, to the versions of their sources."""

import asyncio
from typing import Any

import pytest

from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.config.sources import LaggedSource, StudentSource, TeacherSource
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.records.types import ALONE
from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.following import FollowedSync, Follower, as_students
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.errors import WeightSyncFailed
from tests.support.config_files import minimal
from tests.support.scripted_servers import A, B, C, D, Servers, loser

LIMIT_S = 30.0


def sync_of(servers: Servers) -> WeightSync:
    config = WeightSyncConfig(timeout_s=LIMIT_S, tries=2, staging=True)
    return WeightSync(servers, None, servers, config, loser(servers, 1))


class Run:
    """Two fleets: the student's, and that of a teacher with a source."""

    def __init__(self, source: TeacherSource, teachers: tuple[str, ...] = (C, D)) -> None:
        self.student, self.teacher = Servers((A, B)), Servers(teachers)
        self.follower = Follower(sync_of(self.teacher), source)
        self.sync = FollowedSync(sync_of(self.student), {"teacher": self.follower})

    async def through(self, *versions: int) -> list[WeightSyncReport]:
        await self.sync.open()
        return [await self.sync.sync(version, ALONE) for version in versions]


def test_a_lagged_teacher_holds_the_last_multiple():
    run = Run(LaggedSource(every=3))

    async def scenario():
        await run.sync.open()
        held = []
        for version in range(1, 8):
            report = await run.sync.sync(version, ALONE)
            assert set(run.student.version.values()) == {version}
            held.append(tuple(run.teacher.version.values()))
            assert [each.version for each in report.teachers] == [3, 6][
                version // 3 - 1 : version // 3
            ] * (version % 3 == 0)
        return held

    assert run_virtual(scenario()) == [(0, 0)] * 2 + [(3, 3)] * 3 + [(6, 6)] * 2


def test_the_teacher_comes_first_and_both_hold_the_version():
    run = Run(StudentSource())
    order: list[str] = []
    for name, servers in (("student", run.student), ("teacher", run.teacher)):
        servers.faults["end"] = lambda _, name=name: order.append(name)
    (report,) = run_virtual(run.through(1))
    assert order == ["teacher", "student"]
    assert report.version == 1
    assert [each.servers for each in report.teachers] == [(C, D)]


def test_a_teacher_that_fails_its_sync_is_lost_and_brought_up_to_date():
    run = Run(StudentSource())

    async def scenario():
        await run.sync.open()
        run.teacher.lost.add(D)
        await run.sync.sync(1, ALONE)
        assert run.teacher.urls == (C,)
        assert run.teacher.version[C] == 1
        run.teacher.add(D)
        assert not run.teacher.samples[D], "it scores nothing before it has weights"
        await run.sync.sync(2, ALONE)
        return run.teacher.urls, run.teacher.version

    urls, versions = run_virtual(scenario())
    assert urls == (C, D)
    assert versions == {C: 2, D: 2}


def test_a_run_whose_teacher_cannot_be_synced_fails():
    run = Run(StudentSource())
    run.teacher.faults["send"] = lambda _: WeightSyncFailed("no", [])
    with pytest.raises(WeightSyncFailed, match="no"):
        run_virtual(run.through(1))
    assert set(run.student.version.values()) == {0}


@pytest.mark.parametrize("every", [1, 2])
def test_another_learner_sends_the_version_again(every: int):
    """A learner that goes on from an older checkpoint has other weights of the same version."""
    run = Run(LaggedSource(every=every))

    async def scenario():
        await run.through(1, 2)
        await run.sync.start_over()
        assert run.follower.sync.live.version is None
        run.teacher.log.clear()
        await run.sync.sync(2, ALONE)
        return run.teacher.log

    assert "send" in run_virtual(scenario())
    assert set(run.teacher.version.values()) == {2}


def test_servers_of_an_earlier_process_get_weights_at_once():
    run = Run(LaggedSource(every=100))

    async def scenario():
        await run.sync.open(used=("teacher", "student"))
        await run.sync.sync(7, ALONE)
        return run.teacher.log

    assert "send" in run_virtual(scenario())
    assert set(run.teacher.version.values()) == {0}, "of the last multiple, which is 0"


def test_a_teacher_of_which_no_server_is_left_is_served_on():
    """With the version that its source has, not with the learner's newer one."""
    run = Run(LaggedSource(every=2), (C,))

    async def scenario():
        await run.through(1, 2)
        serving = asyncio.create_task(run.sync.serve_on(lambda: 3, asyncio.Lock()))
        run.teacher.drop(C)
        run.teacher.add(C)
        while not run.teacher.samples[C]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return run.teacher.version

    assert run_virtual(scenario()) == {C: 2}


def test_a_server_leaves_the_group_that_it_is_in():
    run = Run(StudentSource())

    async def scenario():
        await run.through(1)
        await run.sync.remove_server(D, lambda: run.teacher.drop(D))
        await run.sync.remove_server(B, lambda: run.student.drop(B))

    run_virtual(scenario())
    assert (run.student.urls, run.teacher.urls) == ((A,), (C,))
    assert run.teacher.log[-2:] == ["close", f"drop {D}"]


def test_a_transport_takes_a_teacher_s_servers_for_the_student_s():
    source: dict[str, Any] = {"type": "student"}
    model = minimal().student.model
    config = minimal(
        student={"model": str(model), "dtype": "bfloat16"},
        teacher={"model": str(model), "dtype": "float32", "tp": 2, "source": source},
        weight_sync={"round_to": "int8", "overlap": True, "staging": True},
    )
    seen = as_students(config, "teacher")
    assert (seen.student.dtype, seen.student.tp) == ("float32", 2)
    assert seen.weight_sync.staging
    assert (seen.weight_sync.round_to, seen.weight_sync.overlap) == (None, False)
