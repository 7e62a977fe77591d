"""A real Ray cluster of one raylet with its dashboard, to which commands are submitted as jobs."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from checks.raylets import ray_cluster
from megatron_opd.cli.main import main
from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.ray_submit import run_job
from tests.support.cli_cases import small_config

# Says that it is there, and takes its time to end once it is told to.
SLOW = """
import signal, sys, time
def end(*_):
    time.sleep(4)
    print("saved", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        # where a job finds this Python
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        with ray_cluster({"include_dashboard": True}) as cluster:
            yield f"http://{cluster.webui_url}"


def test_output_and_exit_code_of_a_job_come_back(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")  # must not be taken instead
    code = "import os, sys; print('x' * 100_000); sys.exit(os.environ['WORD'] + ' & $HOME \"')"
    shown: list[str] = []
    assert run_job(url, ["python3", "-c", code], {"WORD": "a word"}, shown.append) == 1
    output = "".join(shown)
    assert "\n" + "x" * 100_000 + "\n" in output
    assert output.count('\na word & $HOME "\n') == 1


def test_an_interrupted_job_ends_in_its_own_time(url: str):
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if text.endswith("ready\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(url, ["python3", "-c", SLOW], {}, show)
    assert "".join(shown).endswith("\nsaved\n")


def test_opd_run_runs_in_the_cluster(
    url: str, tmp_path: Path, models: Path, capfd: pytest.CaptureFixture[str]
):
    """With the file of this machine, and its relative paths below the cluster's directory."""
    tree = small_config(tmp_path, models)
    tree["data"]["train"] = "missing.jsonl"
    tree["cluster"] = {"type": "ray", "ray": {"submit": url, "directory": str(tmp_path)}}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    assert main(["run", str(config), "--set", "run.seed=3", "--overwrite"]) == 2
    output = capfd.readouterr().out
    assert "\nerror: data.train" in output
    assert "missing.jsonl" in output

    gone = ["--set", f"cluster.ray.directory={tmp_path}/gone"]
    assert main(["run", str(config), *gone]) == 2
    assert (
        "\nerror: cluster.ray.directory must be a directory on the cluster's head node, got "
        f"{tmp_path}/gone: No such file or directory\n"
    ) in capfd.readouterr().out


def test_a_dashboard_that_does_not_answer_is_one_line():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(CannotPlace) as error:
            run_job(url, ["true"], {}, print)
    line = str(error.value)
    assert line.startswith(
        f"cluster.ray.submit must be the address of a Ray cluster's dashboard, got {url}: "
    )
    assert "\n" not in line
