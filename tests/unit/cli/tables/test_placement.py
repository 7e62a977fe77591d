"""The map that `opd check` draws."""

from pathlib import Path

import pytest

from megatron_opd.cli.main import main
from tests.support.cli_cases import call, refused
from tests.support.gpus import with_gpus
from tests.support.paths import ROOT

ONE_NODE = "examples/cluster/one_node/config.yaml"


def drawn(capsys: pytest.CaptureFixture[str]) -> tuple[list[list[str]], str]:
    """The rows of the map, cells without blanks, and what is said below it."""
    return drawn_in(capsys.readouterr().out)


def drawn_in(said: str) -> tuple[list[list[str]], str]:
    rows: list[list[str]] = []
    lines = said.split("GPU placement")[1].splitlines()[4:]
    end = next(i for i, line in enumerate(lines) if not line.strip())
    for line in lines[:end]:
        gpus, rest = line.split(maxsplit=1)
        what, _, memory = rest.rstrip().partition("  ")
        rows.append([gpus, what, " ".join(memory.split())])
    note: list[str] = []
    for line in lines[end + 1 :]:
        if not line.strip():
            break
        note.append(line.strip())
    return rows, " ".join(note)


def test_without_a_gpu_the_node_has_what_is_needed(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["check", ONE_NODE]) == 0
    rows, note = drawn(capsys)
    students = [[str(3 + i), f"student server {i}", "63.2 GiB"] for i in range(4)]
    assert rows == [
        ["0-2", "learner (3 ranks)", "49.6 GiB"],
        *students,
        ["7", "teacher server 0", "69.5 GiB"],
    ]
    assert note == "this machine has no GPUs: drawn for one node of 8"


def test_a_plan_for_another_machine_may_need_more_than_this_one_has(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with_gpus(monkeypatch, 4)
    assert main(["check", ONE_NODE]) == 0
    assert drawn(capsys)[1] == "this machine has 4 GPUs: drawn for one node of 8"
    with_gpus(monkeypatch, 16)
    assert main(["check", ONE_NODE]) == 0
    rows, note = drawn(capsys)
    assert rows[-1] == ["8-15", "free", ""]
    assert note == "the 16 GPUs of this machine"


def test_shared_gpus_hold_the_sum(tmp_path: Path, config: dict, capsys, monkeypatch):
    with_gpus(monkeypatch, 8, "6")
    refused(capsys, call(tmp_path, config, verb="check"), "need 3 GPUs", "cluster.share_gpus: true")
    sizes = {}
    for name in ("student", "teacher"):
        config[name]["max_total_tokens"] = 65536
    config["cluster"] = {"share_gpus": True}
    assert call(tmp_path, config, verb="check") == 0
    (row,), note = drawn(capsys)
    assert row[:2] == ["0", "learner, student server 0, teacher server 0"]
    assert note == "GPUs as counted within CUDA_VISIBLE_DEVICES=6"
    with_gpus(monkeypatch, 3)
    assert call(tmp_path, config, verb="check") == 0
    rows, _ = drawn(capsys)
    sizes = [float(memory.split()[0]) for _, _, memory in rows]
    assert float(row[2].split()[0]) == pytest.approx(sum(sizes), abs=0.2)


def test_a_pool_of_the_engines_own_size_is_not_counted(
    tmp_path: Path, config: dict, capsys, monkeypatch
):
    with_gpus(monkeypatch, 3)
    assert call(tmp_path, config, verb="check") == 0
    rows, _ = drawn(capsys)
    assert rows[1][2].endswith("MiB and KV cache")


def test_many_servers_are_cut_short(tmp_path: Path, config: dict, capsys):
    config["student"]["servers"] = 5000
    assert call(tmp_path, config, verb="check") == 0
    rows, note = drawn(capsys)
    assert len(rows) == 32
    assert note.startswith("and 4970 more rows")


def test_a_cluster_s_nodes_are_drawn_as_few_as_hold_all(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["check", "examples/cluster/four_nodes/config.yaml"]) == 0
    lines = capsys.readouterr().out.split("GPU placement")[1].splitlines()[4:10]
    assert [line.split()[:4] for line in lines[:5]] == [
        ["0", "0-7", "learner", "node"],
        ["1", "0-7", "learner", "node"],
        *(["2", gpus, "student", "server"] for gpus in ("0-3", "4-7")),
        ["3", "0-7", "teacher", "server"],
    ]
    options = ["--set", "cluster.type=ray", "--set", "student.servers=4"]
    assert main(["check", "examples/cluster/four_nodes/config.yaml", *options]) == 0
    assert "drawn for 5 nodes of 8 GPUs; ray chooses which" in capsys.readouterr().out


def test_ranks_that_do_not_fill_their_nodes_are_refused(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = ["--set", "cluster.ranks_per_node=5"]
    code = main(["check", "examples/cluster/four_nodes/config.yaml", *given])
    refused(capsys, code, "cluster.ranks_per_node", "divide", "5 and 16")


def sizes_of(row: str) -> list[float]:
    """The numbers of MiB or GiB in a line, in MiB."""
    words = row.split()
    scale = {"MiB": 1.0, "GiB": 1024.0}
    return [float(words[i - 1]) * scale[word] for i, word in enumerate(words) if word in scale]


def test_gpus_that_are_used_in_turn_hold_the_larger_part(
    tmp_path: Path, config: dict, capsys, monkeypatch
):
    """Learner and student on GPU 0, phase by phase in a table of its own; the teacher on GPU 1."""
    with_gpus(monkeypatch, 2)
    config["schedule"] = {"type": "sync"}
    for name in ("student", "teacher"):
        config[name]["max_total_tokens"] = 65536
    refused(capsys, call(tmp_path, config, verb="check"), "need 3 GPUs and this process may use 2")
    config["schedule"] = {"type": "sync", "time_shared": True}
    assert call(tmp_path, config, verb="check") == 0
    said = capsys.readouterr().out
    (first, second), _ = drawn_in(said)
    assert first[:2] == ["0", "learner, student server 0, in turn"]
    assert second[:2] == ["1", "teacher server 0"]
    phases = ("servers sample", "learner trains", "weights are sent")
    lines = [next(line for line in said.splitlines() if line.strip().startswith(p)) for p in phases]
    sampling, training, sending = map(sizes_of, lines)
    for learner, server, together in (sampling, training, sending):
        assert together == pytest.approx(learner + server, abs=0.2)
    assert training[1] == 0
    assert sampling[0] == sending[0] < training[0]
    assert sending[1] < sampling[1]
    (most,) = sizes_of(first[2])
    assert most == pytest.approx(max(sampling[2], training[2]), abs=0.2)
    assert most < sampling[1] + training[0]
    assert "in host memory" in said


def test_a_server_works_beside_the_weights_that_the_learner_keeps(
    tmp_path: Path, config: dict, capsys, monkeypatch
):
    """The servers' cache is what needs most; the second one has a GPU of its own."""
    with_gpus(monkeypatch, 3)
    config["schedule"] = {"type": "sync", "time_shared": True}
    config["student"] |= {"max_total_tokens": 500_000, "servers": 2}
    config["teacher"]["max_total_tokens"] = 65536
    assert call(tmp_path, config, verb="check") == 0
    said = capsys.readouterr().out
    (first, second, _), _ = drawn_in(said)
    assert first[:2] == ["0", "learner, student server 0, in turn"]
    assert second[:2] == ["1", "student server 1"]
    line = next(line for line in said.splitlines() if line.strip().startswith("servers sample"))
    weights, server, together = sizes_of(line)
    (most,), (alone,) = sizes_of(first[2]), sizes_of(second[2])
    assert most == pytest.approx(together, abs=0.11)
    assert alone == pytest.approx(server, abs=0.11)
    assert weights > 0.3, "rounding is at most 0.1"
    assert server > 100
