"""What each process on a cluster's machines is started with, read by the programs' own parsers."""

from pathlib import Path

import pytest

from megatron_opd.cli.main import build_parser
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.launch.launcher import Need, NodePlace
from megatron_opd.launch.specs import (
    KEY_VARIABLE,
    ON_GPUS,
    learner_needs,
    learner_specs,
    server_spec,
)
from megatron_opd.learner.__main__ import build_parser as learner_parser

FILE = Path("/shared/run/config.resolved.yaml")
LOG = Path("/shared/run/logs/learner.log")


def learner(**parallel: int) -> LearnerConfig:
    return LearnerConfig.model_validate({"parallel": parallel})


def places(count: int, gpus: int) -> list[NodePlace]:
    return [
        NodePlace(Need("learner", i, gpus), f"10.0.0.{i + 1}", 29500 + i, f"n{i}")
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("ranks", "per_node", "nodes"), [(1, 8, [1]), (8, 8, [8]), (16, 8, [8, 8]), (6, 2, [2, 2, 2])]
)
def test_the_learner_s_ranks_fill_its_nodes(ranks: int, per_node: int, nodes: list[int]):
    needs = learner_needs(learner(dp=ranks), per_node, gpus=True)
    assert [(need.key, need.index, need.gpus) for need in needs] == [
        ("learner", i, count) for i, count in enumerate(nodes)
    ]
    assert {need.gpus for need in learner_needs(learner(dp=ranks), per_node, gpus=False)} == {0}


def test_ranks_that_leave_a_node_half_empty_are_refused():
    with pytest.raises(ValueError, match=r"^cluster.ranks_per_node must divide .* 8 and 12 ranks$"):
        learner_needs(learner(dp=12), 8, gpus=True)


@pytest.mark.parametrize(
    ("role", "kind", "name"),
    [
        ("student", "student", None),
        ("teacher", "teacher", None),
        ("teachers.maths", "teacher", "maths"),
    ],
)
def test_a_server_is_opd_serve_at_its_own_address(role: str, kind: str, name: str | None):
    place = NodePlace(Need(role, 3, 2), "10.0.0.7", 31003, "n7")
    spec = server_spec(FILE, role, place, LOG, "a secret", {"NCCL_DEBUG": "WARN"})
    dash_m, module, *words = spec.arguments
    assert (dash_m, module) == ("-m", "megatron_opd")
    asked = build_parser().parse_args(words)
    assert (asked.verb, asked.role, asked.name, asked.index) == ("serve", kind, name, 3)
    assert asked.config == FILE
    # server 3 listens on base_port + 3
    assert asked.overrides == [
        f"{role}.host=10.0.0.7",
        f"{role}.base_port=31000",
        f"{role}.gpus=null",
        f"{role}.api_key_env={KEY_VARIABLE}",
    ]
    assert spec.env == {"NCCL_DEBUG": "WARN", KEY_VARIABLE: "a secret"}
    assert "secret" not in " ".join(spec.arguments) + repr(spec)


def test_a_server_with_a_named_key_gets_none():
    place = NodePlace(Need("student", 0, 1), "h", 31000, "n")
    spec = server_spec(FILE, "student", place, LOG, None, {})
    assert spec.env == {}
    assert "api_key_env" not in " ".join(spec.arguments)


def test_every_node_of_the_learner_is_torchrun_with_its_share():
    config = learner(tp=2, dp=8)
    env = {"TOKEN": "t", "OMP_NUM_THREADS": "2"}
    specs = learner_specs(FILE, config, places(2, 8), "tcp://10.0.0.9:1", LOG, env)
    assert [spec.log.name for spec in specs] == ["learner.log", "learner-1.log"]
    for node, spec in enumerate(specs):
        split = spec.arguments.index("-m", 1)
        assert spec.arguments[:split] == (
            "-m",
            "megatron_opd.learner.torchrun",
            "--nnodes=2",
            "--nproc-per-node=8",
            f"--node-rank={node}",
            "--master-addr=10.0.0.1",
            "--master-port=29500",
        )
        assert spec.arguments[split + 1] == "megatron_opd.learner"
        asked = learner_parser().parse_args(spec.arguments[split + 2 :])
        assert (asked.config, asked.controller) == (FILE, "tcp://10.0.0.9:1")
        assert asked.overrides == ["weight_sync.host=10.0.0.1"]
        assert ON_GPUS.items() <= spec.env.items()
        assert spec.env["OMP_NUM_THREADS"] == "2", "the user's"
        assert spec.env["TOKEN"] == "t"


def test_without_gpus_the_learner_s_environment_is_the_node_s():
    (spec,) = learner_specs(FILE, learner(), places(1, 0), "tcp://10.0.0.9:1", LOG, {})
    assert spec.env == {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
