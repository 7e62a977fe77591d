"""What a run with sampler sites refuses, in one line that names key, rule, value and remedy."""

from copy import deepcopy

import pytest
from pydantic import ValidationError

from megatron_opd.config import schema
from megatron_opd.config.schema import Config
from megatron_opd.config.site_rules import SITE_RULES
from megatron_opd.config.sites import open_permits
from tests.support.config_files import MINIMAL

SITES = MINIMAL | {
    "sites": {"members": {"near": {}, "far": {"concurrency": 4}}},
    "weight_sync": {"type": "disk", "directory": "/weights"},
    "evaluation": {"problems": 0},
}


def tree(changes):
    found = deepcopy(SITES)
    for key, value in changes.items():
        *path, last = key.split(".")
        at = found
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return found


def line(changes):
    with pytest.raises(ValidationError) as refused:
        Config.model_validate(tree(changes))
    (error,) = refused.value.errors()
    assert "\n" not in error["msg"]
    return error["msg"]


REFUSED = [
    ({"sites.members": {}, "sites.port": 33000}, "no effect without sites.members"),
    ({"weight_sync": {"type": "shards"}}, "weight_sync.type must be disk"),
    ({"student.urls": ["http://127.0.0.1:1"]}, "student.urls must be []"),
    ({"workers.count": 1}, "workers.count must be 0"),
    (
        {"schedule": {"type": "sync", "time_shared": True}},
        "schedule.time_shared must be false",
    ),
    (
        {"schedule": {"type": "sync"}, "run.deterministic": True},
        "run.deterministic must be false",
    ),
    ({"cluster.fleet_file": "fleet.yaml"}, "cluster.fleet_file must be null"),
    ({"evaluation.problems": 8}, "evaluation.problems must be 0"),
    ({"metrics.health_every": 4}, "metrics.health_every must be 0"),
    (
        {"metrics.leak_every": 4, "data.teacher_prompt_key": "hint"},
        "metrics.leak_every must be 0",
    ),
    ({"cluster.type": "slurm"}, "cluster.type must be local or external"),
    ({"sites.host": "0.0.0.0"}, "sites.host must be an address"),
    ({"sites.members": {"learner": {}}}, "must not have the name 'learner'"),
    ({"learner.listen_port": 32000}, "sites.port must not be the port"),
    ({"rollout.group_size": 8, "buffer.batch_size": 64}, "sites.members.far.concurrency must be"),
    ({"sites.link": {"heartbeat_s": 15.0}}, "sites.link.silence_s must be >="),
    ({"sites.link": {"outbox_bytes": 2**21}}, "sites.link.chunk_bytes must be <="),
    (
        {
            "objective": {"type": "grpo"},
            "data.task": "math",
            "rollout.group_size": 2,
            "sites.members": {"near": {"scores": False}},
        },
        "sites.members.near.scores must be true",
    ),
    ({"simulation.failures": {"mean_hours": 1.0}}, "simulation.failures must be null"),
    ({"sites.max_staleness": 3}, "sites.max_staleness has no effect"),
    ({"sites.admission": "open", "schedule": {"type": "sync"}}, "schedule.type has no effect"),
    (
        {"sites.admission": "open", "schedule": {"max_staleness": 2}},
        "schedule.max_staleness has no effect",
    ),
    (
        {"sites.admission": "open", "schedule": {"hold_batches": 1}},
        "schedule.hold_batches has no effect",
    ),
    (
        {"sites.admission": "open", "schedule": {"order": "completion"}},
        "schedule.order has no effect",
    ),
    (
        {"sites.admission": "open", "sites.max_staleness": 2, "schedule": {"sync_every": 4}},
        "sites.max_staleness must be >= schedule.sync_every - 1",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_does_not_go_with_sites_is_one_line(changes, words):
    assert words in line(changes)


def test_the_table_breaks_every_rule(monkeypatch):
    broken = set()

    def watched(rule):
        def run(config):
            said = rule(config)
            broken.update({rule.__name__} if said is not None else ())
            return said

        return run

    monkeypatch.setattr(schema, "ALL_RULES", tuple(map(watched, SITE_RULES)))
    for changes, _ in REFUSED:
        line(changes)
    assert broken == {rule.__name__ for rule in SITE_RULES}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sites.admission": "open", "sites.max_staleness": 3, "schedule": {"sync_every": 4}},
        {"schedule": {"type": "partial"}},
        {"schedule": {"order": "completion"}},
        {"rollout.group_size": 4},
        {"sites.host": "10.0.0.5"},
        {"weight_sync.delta": True},
        {"sites.members": {"near": {"scores": False}, "far": {}}},
    ],
)
def test_what_goes_with_sites_is_taken(changes):
    Config.model_validate(tree(changes))


def test_without_sites_nothing_of_it_is_refused():
    Config.model_validate(MINIMAL | {"evaluation": {"problems": 8}})


def test_slots_are_the_sites_or_the_runs():
    config = Config.model_validate(tree({"rollout": {"concurrency": 9}}))
    assert config.site_slots == {"near": 9, "far": 4}


def test_bounds_follow_the_admission():
    config = Config.model_validate(tree({"buffer.batch_size": 8}))
    assert (config.staleness_bound, config.permits) == (1, 16)
    changes = {"sites.admission": "open", "sites.max_staleness": 5, "buffer.batch_size": 8}
    config = Config.model_validate(tree(changes | {"rollout.concurrency": 6}))
    assert config.staleness_bound == 5
    assert config.permits == open_permits(8, 1, 10, 5, 1) == 11 + 7 * 8
