"""A learner that loads a checkpoint goes on as the one that was never stopped, at every layout."""

import json
import math
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_opd.checkpoint.restricted_metadata import read_metadata
from megatron_opd.checkpoint.state_dirs import LEARNER, StepDirs, verify
from megatron_opd.checkpoint.state_files import read_sums, sums_name, write_sums
from megatron_opd.records.types import Batch
from tests.dist import state_jobs
from tests.dist.caches import make_batch
from tests.dist.worlds import World, run_world
from tests.support.figures import bounded, relative
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist

# Two optimizer steps an update; clipping and weight decay are on, so that every part of the state
# (step count, moments, main parameters) shows in the next update.
STEP = {
    "optimizer": {"lr": 1e-3, "eps": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1},
    "max_tokens_per_microbatch": 64,
    "num_mini_batches": 2,
}
LAYOUTS: dict[str, dict[str, dict[str, int]]] = {
    "tied": {"one": {}, "pp2": {"pp": 2}},
    "dense": {
        "one": {},
        "tp2": {"tp": 2},
        "vpp2": {"pp": 2, "vpp": 2},
        "dp2": {"dp": 2},
        "cp2": {"cp": 2},
    },
    "moe": {
        "one": {},
        "pp2": {"pp": 2},
        "ep2": {"dp": 2, "ep": 2},
        "tp2ep2": {"tp": 2, "dp": 2, "ep": 2},
    },
}
# One update after the checkpoint is two optimizer steps: the second one's loss and gradient norm
# come from weights that the restored moments have moved.
SAVED_AFTER, UPDATES = 2, 3
KINDS = list(LAYOUTS)
# The tied model's logits are so large that its loss differs by 3e-5 between layouts without a step.
MATRIX = ("dense", "moe")


def size(parallel: dict[str, int]) -> int:
    return math.prod(parallel.get(kind, 1) for kind in ("tp", "cp", "pp", "dp"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "dense": tiny_qwen3(base / "dense", seed=3, num_hidden_layers=4),
        "tied": tiny_qwen3(base / "tied", seed=5, tie_word_embeddings=True),
        "moe": tiny_qwen3_moe(
            base / "moe", seed=4, num_hidden_layers=2, mlp_only_layers=[1], num_key_value_heads=4
        ),
    }


@pytest.fixture(scope="module")
def batches(models: dict[str, Path]) -> dict[str, list[Batch]]:
    return {
        kind: [make_batch(model, samples=4, seed=u, vocab=512, update=u) for u in range(UPDATES)]
        for kind, model in models.items()
    }


@pytest.fixture(scope="module")
def runs(models, batches, tmp_path_factory) -> dict[str, Any]:
    """By kind and layout: the unbroken run, and the runs from every layout's checkpoint."""
    base = tmp_path_factory.mktemp("state")
    found: dict[str, Any] = {}
    for kind, layouts in LAYOUTS.items():
        saved = {name: base / f"{kind}-{name}-checkpoint" for name in layouts}
        common = {"model": models[kind], "batches": batches[kind]}
        for name, parallel in layouts.items():
            out = base / f"{kind}-{name}"
            result = run_world(
                state_jobs.unbroken,
                size(parallel),
                out,
                config=STEP | {"parallel": parallel},
                save_after=SAVED_AFTER,
                target=saved[name],
                in_background=name != "one",
                **common,
            )
            found[kind, name] = {**result, "weights": torch.load(out / "weights.pt")}
        for name, parallel in layouts.items():
            out = base / f"{kind}-{name}-resumed"
            config = STEP | {"parallel": parallel}
            results = run_world(
                state_jobs.resumed, size(parallel), out, config=config, sources=saved, **common
            )
            for source, result in results.items():
                found[kind, source, name] = {**result, "weights": torch.load(out / f"{source}.pt")}
        found[kind] = saved
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_layout_goes_on_bitwise(kind, runs):
    for name in LAYOUTS[kind]:
        unbroken, resumed = runs[kind, name], runs[kind, name, name]
        assert resumed["rows"] == unbroken["rows"][SAVED_AFTER:], name
        assert resumed["digest"] == unbroken["digest"], name
        assert resumed["step"] == 2 * SAVED_AFTER


@pytest.mark.parametrize("kind", KINDS)
def test_weights_reach_every_layout_bitwise(kind, runs):
    for source in LAYOUTS[kind]:
        for name in LAYOUTS[kind]:
            assert runs[kind, source, name]["loaded"] == runs[kind, source]["saved"], (source, name)


@pytest.mark.parametrize("kind", MATRIX)
def test_every_layout_goes_on_from_every_other(kind, runs):
    for source in LAYOUTS[kind]:
        for name in LAYOUTS[kind]:
            unbroken, resumed = runs[kind, name], runs[kind, source, name]
            where = f"{kind}: {source} -> {name}"
            for ours, expected in zip(resumed["rows"], unbroken["rows"][SAVED_AFTER:], strict=True):
                for key in ("loss", "grad_norm", "reverse_kl_nats"):
                    gap = relative(ours[key], expected[key])
                    bounded(f"resumed at another layout: {key} (relative)", gap, 1e-5, where)
            for key, tensor in unbroken["weights"].items():
                gap = float((resumed["weights"][key] - tensor).norm() / tensor.norm())
                bounded("resumed at another layout: a tensor (relative)", gap, 1e-5, where)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_that_is_lost_would_show(kind, runs):
    """Updates after the checkpoint move the weights far more than the bounds above."""
    for name in LAYOUTS[kind]:
        rows = runs[kind, name]["rows"]
        assert len({row["loss"] for row in rows}) == len(rows)
        first, last = rows[SAVED_AFTER - 1], rows[-1]
        assert relative(first["grad_norm"], last["grad_norm"]) > 1e-3


def test_what_is_written_late_is_the_state_at_the_call(models, batches, tmp_path):
    """In bfloat16, where weights are no copies of the main parameters."""
    target = tmp_path / "checkpoint"
    common = {"model": models["tied"], "batches": batches["tied"]}
    config = STEP | {"dtype": "bfloat16"}
    unbroken = run_world(
        state_jobs.unbroken,
        1,
        tmp_path / "unbroken",
        config=config,
        save_after=SAVED_AFTER,
        target=target,
        in_background=True,
        late=True,
        **common,
    )
    found = run_world(
        state_jobs.resumed, 1, tmp_path / "on", config=config, sources={"late": target}, **common
    )["late"]
    assert found["loaded"] == unbroken["saved"]
    assert found["rows"] == unbroken["rows"][SAVED_AFTER:]
    assert found["digest"] == unbroken["digest"]


@pytest.mark.parametrize(
    ("kind", "name", "shares"),
    [
        ("dense", "dp2", [0.5, 0.5]),
        ("dense", "cp2", [0.5, 0.5]),
        ("moe", "ep2", [0.5, 0.5]),
        ("moe", "tp2ep2", [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_every_rank_writes_its_own_share(kind, name, shares, runs):
    """Nothing is gathered: data parallelism spreads the optimizer, and the weights' copies."""
    metadata = read_metadata(runs[kind][name])
    written = {"optimizer": [0] * len(shares), "weights": [0] * len(shares)}
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            rank = int(place.relative_path.removeprefix("__").partition("_")[0])
            what = "optimizer" if index.fqn.startswith("optimizer.") else "weights"
            written[what][rank] += place.length
    for what, counts in written.items():
        got = [count / sum(counts) for count in counts]
        assert got == pytest.approx(shares, abs=0.08), what


def test_a_new_learning_rate_is_used_after_a_load(runs, models, batches, tmp_path):
    """So are the optimizer's other settings: a checkpoint holds none of them."""
    other = {"lr": 3e-4, "weight_decay": 0.25, "beta1": 0.5, "beta2": 0.75, "eps": 1e-5}
    used = run_world(
        state_jobs.settings_after_load,
        1,
        tmp_path,
        model=models["dense"],
        batches=batches["dense"],
        config=STEP | {"optimizer": other},
        source=runs["dense"]["one"],
    )
    assert {group["lr"] for group in used} == {3e-4}
    assert {tuple(group["betas"]) for group in used} == {(0.5, 0.75)}
    assert {group["eps"] for group in used} == {1e-5}
    assert 0.25 in {group["weight_decay"] for group in used}


def test_damage_is_refused_with_the_file_s_name(runs, models, batches, tmp_path):
    whole = runs["dense"]["tp2"]
    sources = {}

    def damaged(name: str, *parts: str) -> Path:
        copy = sources[name] = tmp_path / name
        shutil.copytree(whole, copy)
        return copy.joinpath(*parts)

    shard = next(whole.glob("__1_*.distcp")).name
    path = damaged("cut", shard)
    path.write_bytes(path.read_bytes()[:-1])
    path = damaged("flipped", shard)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    damaged("gone", shard).unlink()
    damaged("unsigned", sums_name(1)).unlink()
    damaged("no-facts", "state.json").write_text("{")
    path = damaged("old", "state.json")
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    sources["other-model"] = runs["moe"]["one"]
    config = STEP | {"parallel": {"tp": 2}}
    run_world(
        state_jobs.refused,
        2,
        tmp_path / "out",
        model=models["dense"],
        config=config,
        sources=sources,
    )
    said = [json.loads((tmp_path / "out" / f"said{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1], "every rank says the same"
    for name, line in said[0].items():
        assert str(sources[name]) in line, (name, line)
        assert "\n" not in line
        assert "Traceback" not in line
    said = said[0]
    assert f"is damaged: {shard} must have" in said["cut"]
    assert f"is damaged: {shard} does not have the checksum" in said["flipped"]
    assert f"{shard} must have" in said["gone"]
    assert "it is missing" in said["gone"]
    assert sums_name(1) in said["unsigned"]
    assert "state.json" in said["no-facts"]
    assert "was written by another version: its format must be 2, got 1" in said["old"]
    assert "is not of this model" in said["other-model"]


class Payload:
    """A pickle of it makes the file `marker` when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_no_payload_in_a_checkpoint_runs(runs, models, batches, tmp_path):
    """Checksums do not help: whoever writes the payload writes them too."""
    whole, marker = runs["tied"]["one"], tmp_path / "ran"
    sources = {name: tmp_path / name for name in ("metadata", "common", "whole")}
    for name, file in (("metadata", ".metadata"), ("common", "common.pt"), ("whole", "")):
        copy = sources[name]
        shutil.copytree(whole, copy)
        written = {entry.name for entry in read_sums(copy, 1)}
        if file:
            (copy / file).write_bytes(pickle.dumps(Payload(marker)))
        write_sums(copy, 0, sorted(written | {file} - {""}))
    common = {"model": models["tied"], "config": STEP}
    out = tmp_path / "refused"
    run_world(state_jobs.refused, 1, out, sources={"x": sources["metadata"]}, **common)
    said = json.loads((out / "said0.json").read_text())["x"]
    assert f"{sources['metadata']}/.metadata is refused: it names posix.mkdir" in said
    assert "\n" not in said
    planted = sources.pop("metadata")
    found = run_world(
        state_jobs.resumed, 1, tmp_path / "on", batches=batches["tied"], sources=sources, **common
    )
    assert found["common"] == found["whole"], "the common.pt of older versions is not needed"
    assert not marker.exists()
    with pytest.raises(CheckpointException):
        load_common_state_dict(planted)
    assert marker.exists(), "the control: Megatron's own load runs it"


@pytest.mark.parametrize(("moment", "in_background"), [("shards", True), ("name", False)])
def test_killed_while_saving_leaves_the_one_before(
    moment, in_background, models, batches, tmp_path
):
    dirs = StepDirs(tmp_path / "checkpoints")
    common = {"model": models["tied"], "config": STEP, "batches": batches["tied"]}
    options = {"root": dirs.root, "moment": moment, "in_background": in_background}
    with World(
        state_jobs.killed_while_saving, 1, tmp_path / "killed", **common, **options
    ) as world:
        assert world.join() == [-signal.SIGKILL], world.errors()
    assert dirs.complete() == [1]
    assert [path.name for path in dirs.torn()] == ["step-000002.part"]
    assert list((dirs.part(2) / LEARNER).glob("*.distcp")), "it was killed while writing"
    verify(dirs.path(1))
    sources = {"before": dirs.path(1) / LEARNER}
    found = run_world(state_jobs.resumed, 1, tmp_path / "on", **common, sources=sources)
    assert len(found["before"]["rows"]) == UPDATES - 1
    assert found["before"]["step"] == 2
