"""What the ranks of a checkpoint test do."""

import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_opd.checkpoint.state_dirs import LEARNER, StepDirs
from megatron_opd.checkpoint.stated_heads import heads_of
from megatron_opd.config.estimator import Estimator
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.state.state import LearnerState
from megatron_opd.learner.state.write import ShardWriter
from megatron_opd.records.types import Batch
from tests.dist.jobs import make_learner, share

REPORTED = ("loss", "grad_norm", "reverse_kl_nats", "mismatch_tokens")


def keeper(learner: MegatronLearner) -> LearnerState:
    heads, dtype = heads_of(learner.spec), learner.config.dtype
    return LearnerState(learner.model, learner.optimizer, learner.world, dtype, heads, timeout_s=60)


def train(learner: MegatronLearner, batches: list[Batch]) -> list[dict[str, Any]]:
    estimator = Estimator.model_validate({})
    rows = []
    for batch in batches:
        figures = learner.train(share(batch, learner, estimator), estimator, 1.0)
        row = msgspec.to_builtins(figures)
        rows.append({key: row[key] for key in REPORTED})
    return rows


def weights(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """The whole model on rank 0, nothing elsewhere; collective."""
    learner.finish_param_gather()
    return {name: tensor.float().clone() for name, tensor in learner.full.tensors()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def unbroken(
    out: Path,
    *,
    model: Path,
    config: dict[str, Any],
    batches: list[Batch],
    save_after: int,
    target: Path,
    in_background: bool,
    late: bool = False,
) -> None:
    """Train on every batch; save after the first `save_after`, and go on at once.

    late: nothing is written (in the background) before the last update has been made.
    """
    learner = make_learner(model, config)
    write, trained = ShardWriter._write, threading.Event()

    def write_late(writer: ShardWriter, *arguments: Any) -> None:
        assert trained.wait(60), "training waits for the writer"
        write(writer, *arguments)

    if late:
        ShardWriter._write = write_late
    state = keeper(learner)
    rows = train(learner, batches[:save_after])
    saved = digest(weights(learner))
    state.save(target, save_after, in_background=in_background)
    rows += train(learner, batches[save_after:])
    trained.set()
    state.wait()
    last = weights(learner)
    if learner.world.rank == 0:
        torch.save(last, out / "weights.pt")
        (out / "result.json").write_text(
            json.dumps({"rows": rows, "saved": saved, "digest": digest(last)})
        )
    dist.destroy_process_group()


def resumed(
    out: Path,
    *,
    model: Path,
    config: dict[str, Any],
    batches: list[Batch],
    sources: dict[str, Path],
) -> None:
    """Load one checkpoint after the other into the same learner and train on from each."""
    learner = make_learner(model, config)
    state = keeper(learner)
    found = {}
    for name, source in sources.items():
        facts = state.load(source)
        loaded = digest(weights(learner))
        rows = train(learner, batches[facts.updates :])
        last = weights(learner)
        if learner.world.rank == 0:
            torch.save(last, out / f"{name}.pt")
            found[name] = {"rows": rows, "loaded": loaded, "digest": digest(last)}
            found[name] |= {"step": facts.step}
    if learner.world.rank == 0:
        (out / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def refused(out: Path, *, model: Path, config: dict[str, Any], sources: dict[str, Path]) -> None:
    """What `load` says to each source, on every rank."""
    learner = make_learner(model, config)
    state = keeper(learner)
    said = {}
    for name, source in sources.items():
        try:
            state.load(source)
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    (out / f"said{learner.world.rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def settings_after_load(
    out: Path, *, model: Path, config: dict[str, Any], batches: list[Batch], source: Path
) -> None:
    """What the optimizer uses after it loaded a checkpoint and made an update."""
    learner = make_learner(model, config)
    facts = keeper(learner).load(source)
    train(learner, batches[facts.updates : facts.updates + 1])
    used = [
        {key: group[key] for key in ("lr", "weight_decay", "betas", "eps")}
        for group in learner.optimizer.param_groups
    ]
    if learner.world.rank == 0:
        (out / "result.json").write_text(json.dumps(used))
    dist.destroy_process_group()


def killed_while_saving(
    out: Path,
    *,
    model: Path,
    config: dict[str, Any],
    batches: list[Batch],
    root: Path,
    moment: str,
    in_background: bool,
) -> None:
    """A complete checkpoint after one update; SIGKILL while that after two is written.

    moment: shards (they are there, signed by no rank) or name (all is there but the name).
    """
    learner = make_learner(model, config)
    state, dirs = keeper(learner), StepDirs(root)
    for updates, batch in enumerate(batches[:2], 1):
        rows = train(learner, [batch])
        part = dirs.start(updates)
        if updates == 2 and moment == "shards":
            state._finish = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        state.save(part / LEARNER, updates, in_background=in_background)
        state.wait()
        if updates == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dirs.publish(updates, [])
        (out / "rows.json").write_text(json.dumps(rows))
