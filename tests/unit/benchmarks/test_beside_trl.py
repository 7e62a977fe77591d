import json
import os
import subprocess

import pytest

from benchmarks.beside_trl.cases import NO_LEARNING, cases, opd_config, trl_arguments
from benchmarks.beside_trl.models import endless, id_of, with_end
from benchmarks.beside_trl.processes import Process, Sample, below, cpu_between, parts_of
from benchmarks.beside_trl.run import opd_steps, trl_steps
from benchmarks.beside_trl.summary import summary
from megatron_opd.config.schema import Config


def test_what_is_below_a_process_is_itself_and_what_it_started():
    with subprocess.Popen(["sleep", "600"]) as child:
        found = {each.pid: each for each in below(os.getpid())}
        alone = below(child.pid)
        child.kill()
    assert found[child.pid].parent == os.getpid() in found
    assert os.getppid() not in found
    assert found[child.pid].command == "sleep 600"
    assert found[os.getpid()].resident_bytes > found[child.pid].resident_bytes > 0
    assert found[os.getpid()].cpu_s > 0
    assert [each.pid for each in alone] == [child.pid]
    assert below(child.pid) == [], "it has ended"


def test_a_process_belongs_to_the_part_of_its_nearest_named_ancestor():
    made = [
        Process(1, 0, "opd run", 0.0, 0),
        Process(2, 1, "server --model-path student ", 0.0, 0),
        Process(3, 2, "sglang::scheduler", 0.0, 0),
        Process(4, 1, "server --model-path teacher ", 0.0, 0),
        Process(5, 4, "sglang::scheduler", 0.0, 0),
        Process(6, 1, "helper", 0.0, 0),
    ]
    parts = {"student": "--model-path student", "teacher": "--model-path teacher"}
    found = parts_of(made, 1, parts, "rest")
    assert found == {
        1: "rest",
        2: "student",
        3: "student",
        4: "teacher",
        5: "teacher",
        6: "rest",
    }


def test_processor_seconds_between_samples_are_interpolated():
    samples = [Sample(0.0, {"a": 0.0}), Sample(2.0, {"a": 4.0}), Sample(4.0, {"a": 5.0})]
    assert cpu_between(samples, 1.0, 3.0) == {"a": 2.5}


def test_processor_seconds_outside_the_samples_are_refused():
    samples = [Sample(0.0, {"a": 0.0}), Sample(2.0, {"a": 4.0})]
    with pytest.raises(ValueError, match="no samples on both sides"):
        cpu_between(samples, 1.0, 3.0)


def test_systems_take_turns_and_each_begins_as_often_as_the_other():
    planned = [c for c in cases(10, 2) if c.learning_rate != NO_LEARNING]
    assert [c.system for c in planned[::2]] == ["opd", "opd", "trl", "trl"]
    assert [c.system for c in planned[1::2]] == ["trl", "trl", "opd", "opd"]


def test_names_of_rows_are_unique():
    names = [case.name for case in cases(10, 3)]
    assert len(set(names)) == len(names) == 14


def test_both_systems_are_asked_for_the_same_work(tmp_path):
    models = {"student": tmp_path / "student", "teacher": tmp_path / "teacher"}
    for case in cases(10, 1):
        ours = Config.model_validate(opd_config(case, models, tmp_path))
        theirs = trl_arguments(case, models, tmp_path)
        assert theirs["batch"] == ours.buffer.batch_size
        assert theirs["tokens"] == ours.rollout.max_new_tokens
        assert theirs["updates"] == ours.run.max_steps
        assert theirs["learning_rate"] == ours.learner.optimizer.lr
        assert theirs["dtype"] == ours.learner.dtype == ours.student.dtype == ours.teacher.dtype
        assert not ours.data.shuffle


def test_an_endless_checkpoint_has_the_weights_and_another_end(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"weights")
    added = [{"id": 2, "content": "<|im_end|>"}, {"id": 16, "content": "<empty_output>"}]
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    for name in ("config.json", "generation_config.json"):
        (source / name).write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 2}))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    target = endless(source, tmp_path / "target")
    assert (target / "model.safetensors").samefile(source / "model.safetensors")
    found = [
        json.loads((target / n).read_text()) for n in ("config.json", "generation_config.json")
    ]
    assert found == [{"eos_token_id": 16, "pad_token_id": 2}] * 2
    assert json.loads((target / "tokenizer_config.json").read_text()) == {
        "eos_token": "<empty_output>"
    }
    # made anew once the weights are others
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").write_bytes(b"others")
    endless(source, target)
    assert (target / "model.safetensors").read_bytes() == b"others"


def test_an_unknown_end_token_is_an_error():
    with pytest.raises(KeyError):
        id_of({"added_tokens": [{"id": 2, "content": "<|im_end|>"}]}, "<never>")


def test_only_end_tokens_that_are_there_are_replaced():
    assert with_end({"eos_token_id": 2, "bos_token_id": 1}, "x", 9) == {
        "eos_token_id": 9,
        "bos_token_id": 1,
    }


def test_tokens_of_trl_are_differences_of_sums(tmp_path):
    rows = [
        {"at_s": 1.0, "response_tokens": 768, "loss": 1.5},
        {"at_s": 3.0, "response_tokens": 1500, "loss": 1.25},
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = trl_steps(tmp_path / "steps.jsonl")
    assert [(s.at_s, s.response_tokens, s.loss) for s in steps] == [
        (1.0, 768, 1.5),
        (3.0, 732, 1.25),
    ]


def test_steps_of_a_run_keep_their_distances_and_their_kl(tmp_path):
    rows = [
        {"unix_time_s": 100.0, "num_response_tokens": 5, "reverse_kl_nats": 1.5, "loss": 9.0},
        {"unix_time_s": 103.0, "num_response_tokens": 6, "reverse_kl_nats": 1.0, "loss": 9.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = opd_steps(tmp_path)
    assert second.at_s - first.at_s == pytest.approx(3.0)
    assert [(s.response_tokens, s.loss) for s in (first, second)] == [(5, 1.5), (6, 1.0)]


def row(system: str, tokens_per_s: float, fall: float, control: bool = False) -> dict:
    return {
        "system": system,
        "dtype": "float32",
        "control": control,
        "response_tokens_per_s": tokens_per_s,
        "step_s": 768 / tokens_per_s,
        "peak_pss_bytes": 8 if system == "opd" else 5,
        "cpu_s_per_step": {"all of it": 20.0},
        "reverse_kl_nats_first_two": 1.2,
        "reverse_kl_nats_last_two": 1.2 - fall,
    }


def test_ratios_are_of_medians_and_leave_controls_out():
    rows = [row("opd", v, 0.4) for v in (50, 60, 90)] + [row("trl", v, 0.4) for v in (30, 40, 41)]
    rows += [row("opd", 1000, 0.0, control=True), row("trl", 1000, 0.0, control=True)]
    found = summary(rows)["by_dtype"]["float32"]
    assert found["opd_over_trl"]["response_tokens_per_s"] == pytest.approx(60 / 40)
    assert found["opd_over_trl"]["peak_pss_bytes"] == pytest.approx(8 / 5)
    assert found["opd"]["repetitions"] == 3


def test_a_system_learns_when_every_run_falls_by_more_than_its_control():
    rows = [row("opd", 50, 0.4), row("opd", 50, 0.05), row("opd", 50, 0.0, control=True)]
    rows += [row("trl", 50, 0.4), row("trl", 50, 0.02, control=True)]
    found = summary(rows)["learning"]
    assert not found["opd"]["learns"]
    assert found["trl"]["learns"]


def test_nothing_is_said_of_learning_without_a_control():
    assert "learns" not in summary([row("opd", 50, 0.4)])["learning"]["opd"]
