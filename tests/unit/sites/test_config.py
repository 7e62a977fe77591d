"""What a site runs with: its own servers, ports that no other site takes, its slots."""

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.launch.servers import server_ports
from megatron_opd.sites.config import member, site_config
from tests.support.config_files import minimal

MEMBERS = {"a": {"servers": 3, "concurrency": 7}, "b": {}, "c": {"servers": 1}}


def config_of(student: int = 0, teacher: int = 0) -> Config:
    return minimal(
        student={"model": "student", "servers": 2, "base_port": student},
        teacher={"model": "teacher", "servers": 2, "base_port": teacher},
        teachers={"more": {"model": "more", "base_port": teacher and teacher + 100}},
        data={"train": "train.jsonl", "teacher_key": "who"},
        rollout={"concurrency": 5},
        weight_sync={"type": "disk", "directory": "/weights"},
        evaluation={"problems": 0},
        sites={"members": MEMBERS},
    )


def ports(config: Config, key: str) -> list[int]:
    section = config.student if key == "student" else config.all_teachers[key]
    return [section.base_port + index for index in range(section.servers)]


def test_a_site_has_its_own_servers_and_slots_or_the_runs():
    config = config_of()
    found = {name: site_config(config, name) for name in MEMBERS}
    assert [each.student.servers for each in found.values()] == [3, 2, 1]
    assert [each.rollout.concurrency for each in found.values()] == [7, 5, 5]
    assert config.student.servers == 2, "the run's own configuration is as it was"


@pytest.mark.parametrize("key", ["student", "teacher", "more"])
def test_no_two_sites_on_a_machine_take_the_same_port(key: str):
    config = config_of(24000, 25000)
    taken = [port for name in MEMBERS for port in ports(site_config(config, name), key)]
    assert len(set(taken)) == len(taken)
    first = (
        24000 if key == "student" else config.all_teachers[key].base_port + len(ports(config, key))
    )
    assert taken == list(range(first, first + len(taken)))


def test_free_ports_stay_free_ports():
    assert site_config(config_of(), "c").student.base_port == 0
    assert len(server_ports(site_config(config_of(), "a").student, "student")) == 3


def test_ports_beyond_the_last_are_refused():
    config = config_of(65532)
    assert ports(site_config(config, "a"), "student") == [65532, 65533, 65534]
    with pytest.raises(UserError, match=r"^student\.base_port must leave ports .* 65532 and 3"):
        site_config(config, "b")


def test_a_site_that_is_none_is_named_with_those_there_are():
    with pytest.raises(UserError, match=r"sites\.members must .*'d'; the sites are: a, b, c$"):
        member(config_of(), "d")
    with pytest.raises(UserError, match="the sites are: none"):
        member(minimal(), "a")
