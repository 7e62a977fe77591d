"""The examples of Ray clusters: their commands are ours, and their machines hold the run."""

import shlex
from typing import Any

import pytest
import yaml

from megatron_opd.cli.commands.run import run
from megatron_opd.cli.main import build_parser
from megatron_opd.config.load import load_config
from megatron_opd.config.roles import all_roles
from megatron_opd.config.schema import Config
from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.machines import needs_of
from megatron_opd.launch.ray_capacity import Capacity, check_possible
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "cluster" / "ray"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text())


def config_of(command: str) -> Config:
    """What a command line of an example runs with."""
    program, *words = shlex.split(command)
    assert program == "opd"
    arguments = build_parser().parse_args(words)
    assert arguments.handler is run
    return load_config(Config, ROOT / arguments.config, arguments.overrides)


def check_fits(config: Config, nodes: list[Capacity]) -> None:
    """Raise CannotPlace when these nodes can never hold the run."""
    assert config.cluster.type == "ray"
    needs = needs_of(config, all_roles(config), gpus=True)
    check_possible(needs, config.cluster.ray.cpus, nodes)


def test_kuberay_runs_our_command_on_nodes_that_hold_it():
    job = read("rayjob.yaml")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    config = config_of(spec["entrypoint"])
    assert f'"ray[default]=={cluster["rayVersion"]}"' in (ROOT / "setup.py").read_text()
    assert cluster["authOptions"] == {"mode": "token"}, "else the run refuses the cluster"
    (group,) = cluster["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    node = Capacity(float(limits["nvidia.com/gpu"]), float(limits["cpu"]))
    check_fits(config, [node] * group["replicas"])
    with pytest.raises(CannotPlace):
        check_fits(config, [node] * (group["replicas"] - 1))
    assert str(config.run.dir).startswith(container["volumeMounts"][0]["mountPath"])


def test_skypilot_runs_our_command_on_machines_that_hold_it():
    task = read("skypilot.yaml")
    script = task["run"].replace("\\\n", " ")
    (command,) = (line for line in script.splitlines() if line.strip().startswith("opd run"))
    config = config_of(command.replace("$head", "10.0.0.1"))
    assert config.cluster.ray.address == "10.0.0.1:6379"
    assert config.cluster.ray.autoscaling
    assert script.index("export RAY_AUTH_MODE=token") < script.index("ray start")
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}
    _, _, gpus = task["resources"]["accelerators"].partition(":")
    check_fits(config, [Capacity(float(gpus), 64)] * task["num_nodes"])
