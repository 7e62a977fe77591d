"""A Ray cluster that others reach must ask for a token; real clusters, asked as a stranger would.

Each cluster is in a process of its own, because Ray reads its mode once.
"""

import json
import subprocess
import sys

import pytest

from megatron_opd.launch import ray_token
from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.ray_token import require_token, require_token_of_dashboard
from tests.support.paths import ROOT

# What a run of another machine would find: loopback counts as an address like any other.
PROGRAM = """
import json, sys
from checks.raylets import ray_cluster
from megatron_opd.config.ray import RayConfig
from megatron_opd.launch import ray_token
from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.ray_cluster import RayLauncher
from megatron_opd.launch.ray_submit import run_job
(token,) = json.loads(sys.argv[1])
ray_token.is_loopback = lambda host: False

def line(call):
    try:
        return str(call())
    except CannotPlace as error:
        return str(error)

def address_of(launcher):
    try:
        return launcher.host
    finally:
        launcher.close()

with ray_cluster({"include_dashboard": True}, token=token) as cluster:
    url, settings = f"http://{cluster.webui_url}", RayConfig(address=cluster.address)
    found = {
        "address": cluster.address,
        "url": url,
        "join": line(lambda: address_of(RayLauncher(settings))),
        "join insecurely": line(lambda: address_of(RayLauncher(settings, insecure=True))),
        "submit": line(lambda: run_job(url, ["true"], {}, lambda text: None)),
    }
print("FOUND" + json.dumps(found))
"""


def found(token: str | None) -> dict[str, str]:
    command = [sys.executable, "-c", PROGRAM, json.dumps([token])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stderr
    return json.loads(lines[0].removeprefix("FOUND"))


def test_an_open_cluster_is_refused_unless_that_is_written_down():
    said = found(None)
    for key, call, address in (
        ("cluster.ray.address", "join", said["address"]),
        ("cluster.ray.submit", "submit", said["url"]),
    ):
        assert said[call].startswith(
            f"{key} must be a Ray cluster with token authentication, got {address}, which "
        )
        assert "security.insecure: true" in said[call]
    assert said["join insecurely"] == "127.0.0.1"


def test_a_cluster_with_a_token_is_joined():
    said = found("a-token-of-this-cluster-0123456789")
    assert said["join"] == "127.0.0.1"
    assert said["submit"] == "0", "the job's exit code"


def test_loopback_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_token, "_head_is_open", lambda address: True)
    monkeypatch.setattr(ray_token, "_dashboard_is_open", lambda url: True)
    require_token("127.0.0.1:6379")
    require_token("[::1]:6379")
    require_token_of_dashboard("http://localhost:8265")
    with pytest.raises(CannotPlace, match=r"cluster\.ray\.address .* got 10\.0\.0\.1:6379"):
        require_token("10.0.0.1:6379")
    with pytest.raises(CannotPlace, match=r"cluster\.ray\.submit .* got http://head:8265"):
        require_token_of_dashboard("http://head:8265")
