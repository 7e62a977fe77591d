"""`opd convert` as a user meets it: reports, refusals, exit codes."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_opd.cli.commands import convert
from megatron_opd.cli.main import main
from megatron_opd.models.file_kinds import other_kind
from tests.support.models import tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model", vocab_size=301)


def called(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["convert", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_there_and_back(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = called(capsys, "hf-to-megatron", llama, tmp_path / "m", "--tp", 2, "--pp", 2)
    assert code == 0
    report = json.loads(out)
    assert report["verified"] == ["checksums"]
    assert report["tensor_bytes"] == sum(
        t.numel() * 4 for t in load_file(llama / "model.safetensors").values()
    )
    options = ("--max-shard-gib", 0.0002, "--dtype", "bfloat16")
    code, out, _ = called(capsys, "megatron-to-hf", tmp_path / "m", tmp_path / "hf", *options)
    assert code == 0
    assert json.loads(out)["units"] == len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_verify_compares_logits_in_a_process_of_its_own(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, out, err = called(capsys, "hf-to-megatron", llama, tmp_path / "m", "--verify")
    assert code == 0, err
    report = json.loads(out)
    assert report["verified"] == ["checksums", "numbers", "logits"]
    assert report["max_abs_logit_diff"] <= 1e-5 * report["max_abs_logit"]
    assert report["tokens"] == 64


def test_logits_that_differ_fail(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    found = {"max_abs_logit_diff": 1e-2, "max_abs_logit": 9.0, "tokens": 64}

    def told(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, json.dumps(found) + "\n", "")

    monkeypatch.setattr(convert.subprocess, "run", told)
    code, _, err = called(capsys, "hf-to-megatron", llama, tmp_path / "m", "--verify")
    assert code == 1
    assert "differ by 1.00e-02" in err
    assert err.count("\n") == 1
    found["max_abs_logit_diff"] = float("nan")
    code, _, err = called(capsys, "megatron-to-hf", tmp_path / "m", tmp_path / "hf", "--verify")
    assert code == 1
    assert "differ by nan" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", 8), "--tp must divide the model's attention heads, got tp=8 and 4"),
        (("--pp", 3), "--pp must divide the model's layers, got pp=3 and 2 layers"),
        (("--ep", 2), "--ep must divide the model's experts, got ep=2 and 0 experts"),
        (("--vpp", 2), "--vpp above 1 needs --pp above 1, got --vpp 2 --pp 1"),
        (("--pp", 2, "--vpp", 2), "--pp * vpp must divide the model's layers, got pp=2 * vpp=2"),
    ],
)
def test_degrees_that_do_not_fit(
    options: tuple[object, ...],
    message: str,
    llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    code, _, err = called(capsys, "hf-to-megatron", llama, tmp_path / "m", *options)
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("inside", ["iter_0000010/mp_rank_00", "release/mp_rank_00_000", ""])
def test_a_legacy_checkpoint_is_named(
    inside: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Before: it must hold config.json, or is not a Megatron distributed checkpoint."""
    root = tmp_path / "mp_rank_00"
    file = root / inside / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    for source in {root, file.parent}:
        for options in ((), ("--model", llama)):
            code, _, err = called(capsys, "megatron-to-hf", source, tmp_path / "hf", *options)
            assert code == 2
            assert f"{source} is a legacy Megatron checkpoint" in err
            assert "--ckpt-format torch_dist" in err
        assert "is a legacy Megatron checkpoint" in str(other_kind(source))


def test_refusals_are_one_line(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "there").mkdir()
    cases = (
        ("hf-to-megatron", tmp_path / "no", tmp_path / "m", "SRC must be a checkpoint directory"),
        ("hf-to-megatron", tmp_path / "there", tmp_path / "m", "has no config.json"),
        ("hf-to-megatron", llama, tmp_path / "there", "exists already"),
        ("megatron-to-hf", llama, tmp_path / "m", "is not a Megatron distributed checkpoint"),
        ("megatron-to-hf", tmp_path, tmp_path / "m", "without --model must hold config.json"),
    )
    for way, source, target, message in cases:
        code, out, err = called(capsys, way, source, target)
        assert (code, out) == (2, "")
        assert message in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("size", ["nan", "inf", "1e300", "0", "-1"])
def test_sizes_of_files_are_positive_numbers(
    size: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    option = f"--max-shard-gib={size}"
    code, out, err = called(capsys, "megatron-to-hf", llama, tmp_path / "hf", option)
    assert (code, out) == (2, "")
    assert f"--max-shard-gib must be > 0 and <= 1000000, got {float(size)}" in err


@pytest.mark.parametrize("option", [("--tp", "0"), ("--dtype", "int8"), ("--tp", "x")])
def test_options_out_of_range(
    option: tuple[str, str], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        called(capsys, "hf-to-megatron", llama, tmp_path / "m", *option)
    assert option[0] in capsys.readouterr().err


def test_the_learner_starts_from_a_megatron_checkpoint(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from megatron_opd.checkpoint.convert import source_of
    from megatron_opd.models.spec import read_model_spec

    called(capsys, "hf-to-megatron", llama, tmp_path / "m")
    source = source_of(tmp_path / "m", read_model_spec(tmp_path / "m"), None)
    for name, tensor in load_file(llama / "model.safetensors").items():
        shape = tuple(tensor.shape)
        assert torch.equal(source.read(name, shape, 0, 1, shape[0] - 1), tensor[1:]), name
    with pytest.raises(ValueError, match="lacks the tensor other"):
        source.read("other", (1,), 0, 0, 1)
