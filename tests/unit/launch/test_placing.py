"""Which GPUs the processes of each command see, and what cannot be placed.

The driver's count is made up; the processes are real, and print their environment instead of
serving.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from megatron_opd.cli.main import main
from megatron_opd.launch import machines, sft
from megatron_opd.mismatch import run as mismatch_run
from sglang_bridge.ports import free_port
from sglang_bridge.server import launch, spec
from tests.support.cli_cases import call, refused
from tests.support.gpus import SEER, with_gpus
from tests.support.models import tiny_qwen3


@pytest.fixture(autouse=True)
def processes_that_print(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (launch, "server_command"),
        (spec, "server_command"),
        (machines, "learner_command"),
        (mismatch_run, "learner_command"),
        (sft, "learner_command"),
    ):
        monkeypatch.setattr(module, name, lambda *_: SEER)
    monkeypatch.setenv("SIBLINGS", "0")


def seen(tmp_path: Path) -> dict[str, list[str]]:
    """What each process of a run printed, by the name of its log."""
    logs = (tmp_path / "run" / "logs").glob("*.log")
    return {log.stem: log.read_text().split()[1:] for log in logs}


def started(
    tmp_path: Path, config: dict[str, Any], *settings: str, siblings: int = 3
) -> dict[str, list[str]]:
    """`opd run`, whose processes end once all have started, and what they saw."""
    os.environ["SIBLINGS"] = str(siblings)
    options = [word for one in settings for word in ("--set", one)]
    assert call(tmp_path, config, *options) != 0
    return seen(tmp_path)


RANKS = "learner.parallel={dp: 2}"


def test_every_process_of_a_run_sees_its_own_gpus(tmp_path: Path, config: dict, monkeypatch):
    with_gpus(monkeypatch, 9)
    assert started(tmp_path, config, RANKS, "student.servers=3", "student.tp=2", siblings=5) == {
        "learner": ["0,1", "PCI_BUS_ID", "1"],
        "student-0": ["2,3", "PCI_BUS_ID", "None"],
        "student-1": ["4,5", "PCI_BUS_ID", "None"],
        "student-2": ["6,7", "PCI_BUS_ID", "None"],
        "teacher-0": ["8", "PCI_BUS_ID", "None"],
    }


@pytest.mark.parametrize(
    ("visible", "learner", "students", "teacher"),
    [
        ("4,5,6,7,2", "4,5", ["6", "7"], "2"),
        ("GPU-a,GPU-b,GPU-c,MIG-d,GPU-e", "GPU-a,GPU-b", ["GPU-c", "MIG-d"], "GPU-e"),
    ],
)
def test_a_list_of_the_users_is_never_left(
    tmp_path: Path, config: dict, monkeypatch, visible: str, learner, students, teacher
):
    with_gpus(monkeypatch, 8, visible)
    found = started(tmp_path, config, RANKS, "student.servers=2", siblings=4)
    assert {name: words[0] for name, words in found.items()} == {
        "learner": learner,
        "student-0": students[0],
        "student-1": students[1],
        "teacher-0": teacher,
    }
    assert {words[1] for words in found.values()} == {"None"}, "the order is their author's"


def test_lists_of_the_configuration_count_within_the_users(
    tmp_path: Path, config: dict, monkeypatch
):
    with_gpus(monkeypatch, 8, "7,6,5,4")
    found = started(tmp_path, config, "student.gpus=[3]", "learner.gpus=[1]")
    assert {name: words[0] for name, words in found.items()} == {
        "learner": "6",
        "student-0": "4",
        "teacher-0": "7",
    }


@pytest.mark.parametrize("visible", [None, "0"])
def test_without_a_gpu_nothing_is_set(tmp_path: Path, config: dict, monkeypatch, visible):
    with_gpus(monkeypatch, 0, visible)
    found = started(tmp_path, config)
    assert set(map(tuple, found.values())) == {(str(visible), "None", "None")}
    assert len(found) == 3


def test_a_shared_gpu_syncs_weights_over_gloo(tmp_path: Path, config: dict, monkeypatch, capsys):
    with_gpus(monkeypatch, 1)
    found = started(tmp_path, config, "cluster.share_gpus=true")
    assert {words[0] for words in found.values()} == {"0"}
    resolved = yaml.safe_load((tmp_path / "run" / "config.resolved.yaml").read_text())
    assert resolved["weight_sync"]["backend"] == "gloo"
    assert "GPUs: learner 0, student 0, teacher 0" in capsys.readouterr().out
    settings = ("cluster.share_gpus=true", "weight_sync.backend=nccl")
    options = [word for one in settings for word in ("--set", one)]
    code = call(tmp_path, config, "--overwrite", *options)
    refused(capsys, code, "weight_sync.backend must be auto or gloo", "got nccl and GPU 0")


def test_gpus_of_their_own_keep_nccl(tmp_path: Path, config: dict, monkeypatch):
    with_gpus(monkeypatch, 2)
    started(tmp_path, config, "cluster.share_gpus=true")  # the teacher shares
    resolved = yaml.safe_load((tmp_path / "run" / "config.resolved.yaml").read_text())
    assert resolved["weight_sync"]["backend"] == "auto"


@pytest.mark.parametrize("verb", ["check", "run", "mismatch"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["student.servers=8"], ["GPUs and this process may use 4", "student 8 (8 x tp 1)"]),
        (["student.gpus=[4]"], ["student.gpus must be of 0..3", "got 4"]),
        (["student.gpus=[1]", "learner.gpus=[1]"], ["learner.gpus and student.gpus", "GPU 1"]),
        (["learner.gpus=[0, 1]"], ["learner.gpus must name a GPU for each of the 1 ranks"]),
        (
            ["learner.parallel={dp: 8}", "cluster.share_gpus=true"],
            ["learner.parallel must fit on this node", "8 ranks and 4 GPUs"],
        ),
        (["student.extra_args=['--base-gpu-id=1']"], ["--base-gpu-id", "use student.gpus"]),
    ],
)
def test_what_cannot_be_placed_is_refused(
    tmp_path: Path, config: dict, monkeypatch, capsys, verb: str, settings: list[str], words
):
    with_gpus(monkeypatch, 8, "0,1,2,3")
    options = [word for one in settings for word in ("--set", one)]
    refused(capsys, call(tmp_path, config, *options, verb=verb), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["run", "mismatch"])
def test_a_list_is_no_use_without_a_gpu(
    tmp_path: Path, config: dict, monkeypatch, capsys, verb: str
):
    with_gpus(monkeypatch, 0)
    code = call(tmp_path, config, "--set", "student.gpus=[0]", verb=verb)
    refused(capsys, code, "student.gpus must be null on a node without a GPU", "got [0]")


@pytest.mark.parametrize(
    ("index", "gpus", "sees"),
    [(0, None, "4,5"), (1, None, "6,7"), (2, None, "4,5"), (1, [0, 1, 3, 2], "7,6")],
)
def test_a_server_started_alone(
    tmp_path: Path, config: dict, monkeypatch, capfd, index: int, gpus: list[int] | None, sees: str
):
    with_gpus(monkeypatch, 8, "4,5,6,7")
    config["student"] |= {"tp": 2, "servers": 2, "base_port": free_port() - index, "gpus": gpus}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    file = str(tmp_path / "config.yaml")
    assert main(["serve", "student", file, "--index", str(index)]) == 0
    assert capfd.readouterr().out.split()[:2] == ["sees", sees]


SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize(
    ("asleep", "name", "sees"),
    [
        (mismatch_run, "learner_command", "sees 1 PCI_BUS_ID None"),
        (launch, "server_command", "sees 0 PCI_BUS_ID 1"),
    ],
)
def test_mismatch_starts_the_student_and_the_learner_alone(
    tmp_path: Path, config: dict, monkeypatch, capsys, asleep: ModuleType, name: str, sees: str
):
    with_gpus(monkeypatch, 2)  # too few for the teacher too
    monkeypatch.setattr(asleep, name, lambda *_: SLEEPER)
    assert call(tmp_path, config, verb="mismatch") != 0
    assert sees in capsys.readouterr().err


def test_eval_starts_one_server(tmp_path: Path, config: dict, models: Path, monkeypatch, capsys):
    with_gpus(monkeypatch, 8, "5,4")
    config["data"]["heldout"] = config["data"]["train"]
    config["evaluation"]["problems"] = 1
    config["student"]["urls"] = ["http://127.0.0.1:1"]
    model = str(models / "student")
    assert call(tmp_path, config, "--model", model, verb="eval") != 0
    assert "sees 5" in capsys.readouterr().err


def test_sft_places_its_ranks(tmp_path: Path, monkeypatch, capfd):
    with_gpus(monkeypatch, 8, "3,2,1")
    rows = [{"prompt": "1+1=", "response": "2"}] * 4
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = {
        "init": str(tiny_qwen3(tmp_path / "init")),
        "output": str(tmp_path / "out"),
        "train": str(tmp_path / "pairs.jsonl"),
        "batch_size": 4,
        "learner": {"parallel": {"dp": 2}, "gpus": [2, 0]},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(tree))
    assert main(["sft", str(tmp_path / "sft.yaml")]) == 0
    assert capfd.readouterr().out.split()[:2] == ["sees", "1,3"]
