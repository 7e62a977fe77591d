"""What servers are started with, by role and device."""

from pathlib import Path

import pytest

from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.errors import UserError
from megatron_opd.launch import servers
from megatron_opd.launch.servers import make_spec
from sglang_bridge.listening import interface_of
from sglang_bridge.server.spec import server_command
from tests.support.config_files import minimal


def spec_of(dtype: str, role: str = "student"):
    section = {"model": "m", "dtype": dtype, "quantization": "fp8"}
    return make_spec(minimal(**{role: section}), role, 4000, 0, Path("m"))


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_quantization_is_passed_on(role: str):
    assert spec_of("float32", role).quantization == "fp8"
    assert make_spec(minimal(), role, 4000, 0, Path("m")).quantization is None


@pytest.mark.parametrize("weights", ["learner", "sampler"])
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_the_students_servers_keep_what_the_learner_replays(role: Role, weights: str):
    replay = {"routing_replay": "rollout", "routing_weights": weights}
    spec = make_spec(minimal(learner=replay), role, 4000, 0, Path("m"))
    assert spec.routed_experts == (role == "student")
    assert spec.routed_gates == (role == "student" and weights == "sampler")
    assert not make_spec(minimal(), role, 4000, 0, Path("m")).routed_experts


def test_kernels_of_a_gpu_take_no_float32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(servers, "has_gpu", lambda: True)
    assert spec_of("bfloat16").quantization == "fp8"
    with pytest.raises(UserError, match=r"^student\.dtype must be bfloat16 with student\.quantiz"):
        spec_of("float32")


@pytest.mark.parametrize("shared", [True, False])
def test_student_servers_can_give_up_their_memory_where_they_share_it(shared: bool):
    schedule = {"type": "sync", "time_shared": shared}
    config = minimal(schedule=schedule, student={"model": "m", "threads": 2})
    for role in (STUDENT, "teacher"):
        spec = make_spec(config, role, 4000, 0, Path("m"))
        assert spec.shares_memory == (shared and role == STUDENT)
        assert spec.threads == (2 if role == STUDENT else 1)
        assert ("--enable-memory-saver" in server_command(spec)) == spec.shares_memory


def test_groups_listen_on_the_named_interface_which_must_be_there():
    loopback = interface_of("127.0.0.1")
    there = minimal(cluster={"interface": loopback})
    assert make_spec(there, STUDENT, 4000, 0, Path("m")).interface == loopback
    with pytest.raises(UserError, match=r"^cluster\.interface must be one of every machine, got"):
        make_spec(minimal(cluster={"interface": "none0"}), STUDENT, 4000, 0, Path("m"))
