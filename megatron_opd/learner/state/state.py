"""Saves a learner's whole state as a Megatron distributed checkpoint; loads it at any layout.

    .metadata  __RANK_N.distcp  metadata.json                torch_dist: weights and optimizer
    state.json  rng-RANK.safetensors  sums-RANK.json         ours

Invariant: at the layout that saved it, the next updates of a learner that loaded a checkpoint are
bitwise those of the one that was not interrupted; at another layout they differ by rounding only.

The learning rate is a function of the update's index, so the schedule has no state but that.
Files of ours hold no pickle; those of torch and Megatron are read as read.py says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from megatron_opd.checkpoint import state_files
from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.checkpoint.run_lock import LockClaim
from megatron_opd.checkpoint.stated_heads import STATE, Heads
from megatron_opd.learner.devices import cpu
from megatron_opd.learner.state.facts import FORMAT, LearnerFacts, read_facts
from megatron_opd.learner.state.kept import KeptTensors
from megatron_opd.learner.state.model import CONTENT, module_of, sharded_model, without_pickles
from megatron_opd.learner.state.optimizer import (
    OptimizerShare,
    sharded,
    shares_of,
    step_count,
    take_over,
)
from megatron_opd.learner.state.read import read_shards
from megatron_opd.learner.state.write import SaveFailed, ShardWriter, explained, one_line
from megatron_opd.learner.world import World


class LearnerState:
    """Saves and loads one learner. Methods are collective; `finish_param_gather` before `save`.

    heads: of the model. timeout_s: longest that ranks wait for each other while shards are written.
    kept: further tensors that belong to the state, such as averages; None: there are none.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        world: World,
        dtype: str,
        heads: Heads,
        timeout_s: float,
        kept: KeptTensors | None = None,
    ) -> None:
        self._kept = kept
        self._chunks, self._optimizer, self._world, self._dtype = chunks, optimizer, world, dtype
        self._heads, self._timeout_s = heads, timeout_s
        self._device_mode = cpu.install()
        self._writer: ShardWriter | None = None
        self.claim: LockClaim | None = None
        """Checked before a save writes anything, and before its files count as written."""

    def save(self, path: Path, updates: int, *, in_background: bool) -> None:
        """Write the state after `updates` updates to the new directory `path`.

        in_background: return once the state is copied to host memory; `wait`, or every rank's
        sums file, tells when it is written. An earlier save that failed is raised here.
        """
        self.wait()
        if self._writer is None:
            self._writer = ShardWriter(self._timeout_s)
        rank = self._world.rank
        self._check_claim()
        if rank == 0:
            path.mkdir(parents=True)
        dist.barrier()
        self._save_rng(path)
        if rank == 0:
            facts = self._facts(updates)
            write_synced(path / STATE, json.dumps(asdict(facts), indent=1))
        self._writer.prepare(lambda: self._finish(path), in_background=in_background)
        with self._device_mode:
            model = sharded_model(self._chunks)
            shares = shares_of(self._optimizer, loading=False)
            wanted: dict[str, Any] = {"model": model, "optimizer": sharded(shares, model)}
            if self._kept is not None:
                wanted["kept"] = self._kept.sharded(without_pickles(model)[0])
            try:
                dist_checkpointing.save(
                    wanted,
                    str(path),
                    sharded_strategy=self._writer,
                    content_metadata=dict(CONTENT),
                )
            except SaveFailed:
                raise
            except (RuntimeError, OSError) as error:  # raised by Megatron's own files
                raise SaveFailed(explained(error, path)) from error

    def wait(self) -> None:
        """Wait until the background save is on disk; raises what it failed with."""
        if self._writer is not None:
            self._writer.wait()

    def load(self, path: Path) -> LearnerFacts:
        """Take over the state in `path`.

        ValueError, on every rank and naming the file or the reason: it is damaged, of another
        format or of another model.
        """
        facts = read_facts(path)
        if facts.dtype != self._dtype:
            raise ValueError(
                f"learner.dtype must be that of checkpoint {path}, {facts.dtype}, got {self._dtype}"
            )
        self._verify(path, facts)
        with self._device_mode:
            shares = shares_of(self._optimizer, loading=True)
            self._load_tensors(path, shares)
            take_over(shares, facts.step)
        if facts.parallel == self._parallel():
            self._load_rng(path)
        dist.barrier()
        return facts

    def _load_tensors(self, path: Path, shares: Sequence[OptimizerShare]) -> None:
        """Load weights and the optimizer's values. ValueError: `path` is of another model."""
        model, pickled = without_pickles(sharded_model(self._chunks))
        wanted: dict[str, Any] = {"model": model, "optimizer": sharded(shares, model)}
        if self._kept is not None:
            wanted["kept"] = self._kept.sharded(model)
        # reading replaces entries
        places = {chunk: dict(entries) for chunk, entries in model.items()}
        try:
            loaded = read_shards(path, wanted)
        except (CheckpointingException, CheckpointException, KeyError, RuntimeError) as error:
            reason = one_line(error)[:300]
            raise ValueError(
                f"checkpoint {path} is not of this model, or damaged: {reason}"
            ) from error
        if self._kept is not None:
            self._kept.take_over(loaded["kept"], places)
        for index, chunk in enumerate(self._chunks):
            # Each module keeps the pickled state that it already has.
            state = loaded["model"][str(index)] | pickled[str(index)]
            module_of(chunk).load_state_dict(state)

    def _facts(self, updates: int) -> LearnerFacts:
        step = step_count(self._optimizer)
        layout = self._world.size, self._parallel()
        return LearnerFacts(FORMAT, updates, step, *layout, self._dtype, asdict(self._heads))

    def _parallel(self) -> dict[str, Any]:
        return self._world.parallel.model_dump(mode="json")

    def _finish(self, path: Path) -> None:
        """Write this rank's sums once every rank's shards are on disk. Raises NotTheHolder."""
        self._check_claim()
        rank = self._world.rank
        mine = [file.name for file in path.glob(f"__{rank}_*")] + [_rng_name(rank)]
        if rank == 0:
            mine += [STATE, ".metadata"]
        state_files.write_sums(path, rank, mine)

    def _check_claim(self) -> None:
        if self.claim is not None:
            self.claim.check()

    def _verify(self, path: Path, facts: LearnerFacts) -> None:
        """Check every file's size and, shared among the ranks, its checksum."""
        entries = state_files.read_sums(path, facts.world_size)
        for entry in entries:
            state_files.check_size(path, entry)
        world = self._world
        bad = [
            index
            for index in range(world.rank, len(entries), world.size)
            if state_files.sum_file(path, entries[index].name) != entries[index]
        ]
        # All ranks name the same file, and none waits for one that has stopped.
        first = torch.tensor(bad[0] if bad else len(entries), device=world.device)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        if int(first) < len(entries):
            name = entries[int(first)].name
            raise ValueError(
                f"checkpoint {path} is damaged: {name} does not have the checksum it was "
                "written with"
            )

    def _save_rng(self, path: Path) -> None:
        states = {"torch": torch.get_rng_state()}
        if self._world.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        tracked: dict[str, torch.Tensor] = _tracker().get_states()
        states |= {f"megatron.{name}": state for name, state in tracked.items()}
        save_file(
            {name: state.cpu().clone() for name, state in states.items()},
            path / _rng_name(self._world.rank),
        )

    def _load_rng(self, path: Path) -> None:
        states = load_file(path / _rng_name(self._world.rank))
        torch.set_rng_state(states.pop("torch"))
        if self._world.device.type == "cuda":
            torch.cuda.set_rng_state(states.pop("cuda"))
        tracked = {name.removeprefix("megatron."): state for name, state in states.items()}
        _tracker().set_states(tracked)


def _rng_name(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def _tracker() -> Any:
    """Return Megatron's random states of tensor-parallel regions."""
    return get_cuda_rng_tracker()
