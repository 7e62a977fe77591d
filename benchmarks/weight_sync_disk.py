"""Bytes that weight_sync.type: disk writes of a version, whole and as changes, after real updates.

    python -m benchmarks weight_sync_disk

Two learner ranks (TP2, bfloat16 with float32 masters) train a random Qwen3 of 28 M parameters with
AdamW at a constant learning rate, on another synthetic batch each update, and write a version after
each as the run's learner does: the first whole, the others as the numbers whose bfloat16 bits
changed. The bytes are those of all files of a version, the manifest included.

What it cannot say: weights, prompts and scores are random. How many bits change depends on the
learning rate, the size of the weights and how long an optimizer has run: the first steps of Adam
move every weight by about the learning rate. Seconds are of two ranks on whatever cores there are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.step import QWEN3_1_7B
from harness.synthetic import Shape, sample, share, write_model
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.schema import Config
from megatron_opd.models.spec import read_model_spec
from megatron_opd.sizing.parameters import model_parameters
from megatron_opd.weight_sync.disk_messages import DiskRefused, Open, Write, decode, encode
from sglang_bridge.ports import free_port
from sglang_bridge.weights.manifest import version_name

MODEL = QWEN3_1_7B | {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1408,
    "max_position_embeddings": 2048,
}
RATES = (1e-6, 1e-5)
UPDATES = 4
SHAPE = Shape(samples=8, prompt=8, response=24, least_ids=4, most_ids=4)
RUN = "run-0123456789ab"
Tree = dict[str, Any]


def config_of(model: Path, rate: float, directory: Path) -> Config:
    """What the learner is configured with."""
    learner = {"dtype": "bfloat16", "threads": 1, "parallel": {"tp": 2}}
    return Config.model_validate(
        {
            "data": {"train": "unused"},
            "student": {"model": str(model)},
            "teacher": {"model": str(model)},
            "buffer": {"batch_size": SHAPE.samples},
            "learner": {**learner, "optimizer": {"lr": rate}},
            "weight_sync": {"type": "disk", "directory": str(directory), "delta": True},
        }
    )


def rank_main(model: Path, rate: float, scratch: Path) -> None:
    """One rank: train and write; rank 0 leaves the figures in `scratch`."""
    from megatron_opd.learner.learner import MegatronLearner
    from megatron_opd.weight_sync.disk_writer import DiskWriter

    config = config_of(model, rate, scratch / "weights")
    learner = MegatronLearner(model, config.learner, updates=UPDATES, seed=0)
    writer = DiskWriter(learner.full, config)

    def ask(request: Open | Write) -> None:
        answer = decode(writer.handle(encode(request)))
        if isinstance(answer, DiskRefused):
            raise RuntimeError(answer.cause)

    ask(Open(RUN, "benchmark", "bfloat16"))
    versions: list[Tree] = []
    name = None
    for update in range(UPDATES + 1):
        if update:
            vocabulary = learner.spec.vocab_size
            samples = [
                sample(SHAPE.samples * update + i, SHAPE, vocabulary, update - 1)
                for i in range(SHAPE.samples)
            ]
            batch = share(samples, config.learner, learner.world.data_rank, update - 1)
            learner.train(batch, Estimator(), 1.0)
        learner.finish_param_gather()
        began = time.perf_counter()
        before, name = name, version_name(update, update)
        ask(Write(name, update, update == 0, before))
        written_s = time.perf_counter() - began
        files = (scratch / "weights" / RUN / name).iterdir()
        size = sum(file.stat().st_size for file in files)
        versions.append({"after_updates": update, "bytes": size, "write_s": written_s})
    writer.close()
    if int(os.environ["RANK"]) == 0:
        (scratch / "figures.json").write_text(json.dumps(versions), encoding="utf-8")


def measure() -> Tree:
    """Every learning rate in turn."""
    found: dict[str, Tree] = {}
    with tempfile.TemporaryDirectory(prefix="opd-disk-") as directory:
        model = write_model(Path(directory) / "model", MODEL)
        for rate in RATES:
            scratch = Path(directory) / f"{rate:g}"
            scratch.mkdir()
            versions = _run(model, rate, scratch)
            whole, changes = versions[0]["bytes"], [each["bytes"] for each in versions[1:]]
            found[f"{rate:g}"] = {
                "versions": versions,
                "whole_mb": whole / 1e6,
                "changes_mb": [size / 1e6 for size in changes],
                "changes_over_whole": [size / whole for size in changes],
                "said": f"{changes[-1] / 1e6:.2f} MB of {whole / 1e6:.1f} MB",
            }
        parameters = model_parameters(read_model_spec(model)).total
    return {"model": MODEL, "parameters": parameters, "by_learning_rate": found}


def _run(model: Path, rate: float, scratch: Path) -> list[Tree]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}", "-m", "benchmarks.weight_sync_disk"]
    command += [str(model), str(rate), str(scratch)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"learning rate {rate:g}: {done.stderr[-2000:]}")
    return json.loads((scratch / "figures.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
