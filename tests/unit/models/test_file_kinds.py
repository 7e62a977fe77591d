"""What lies where a model should be is named as what it is, with what to do about it."""

from pathlib import Path

import pytest

from megatron_opd.models.file_kinds import other_kind
from megatron_opd.models.spec import read_config


def holding(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["refs/main", "snapshots/ab12/config.json"], "name {}/snapshots/ab12"),
        (["checkpoint-90/config.json", "checkpoint-100/config.json"], "name {}/checkpoint-100 (of"),
        (["actor/huggingface/config.json"], "name {}/actor/huggingface"),
        (
            ["config.json", "__0_0.distcp", ".metadata"],
            "FSDP's shards: `accelerate merge-weights {}",
        ),
        (
            ["config.json", "zero_to_fp32.py", "global_step1/x.pt"],
            "DeepSpeed's shards: `python zero",
        ),
        (["model_world_size_8_rank_0.pt", "huggingface/config.json"], "verl's shards: `python -m"),
        (["__0_0.distcp", ".metadata", "metadata.json", "common.pt"], "is a Megatron checkpoint"),
        (["model-q4.gguf"], "holds its weights as model-q4.gguf"),
        (["config.json"], None),
        ([], None),
    ],
)
def test_what_lies_there_is_named(names: list[str], found: str | None, tmp_path: Path):
    told = other_kind(holding(tmp_path, *names))
    assert (told is None) if found is None else (found.format(tmp_path) in str(told))
    if "config.json" not in names and found is not None:
        with pytest.raises(ValueError, match=r"^/") as error:
            read_config(tmp_path / "config.json")
        assert str(error.value) == told


def test_a_link_of_the_cache_whose_file_is_gone_is_named(tmp_path: Path):
    holding(tmp_path, "config.json")
    (tmp_path / "model.safetensors").symlink_to("../../blobs/ab12")
    assert other_kind(tmp_path) == (
        f"{tmp_path}/model.safetensors leads to ../../blobs/ab12, which is not there: download the "
        "model again"
    )
