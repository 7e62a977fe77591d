"""What the ranks of a learner do on fake cards, and the same ranks on a CPU."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.schema import Config
from megatron_opd.learner import learner as learner_module
from megatron_opd.learner.devices import cpu
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.records.types import Batch
from megatron_opd.weight_sync.shards_messages import Join
from megatron_opd.weight_sync.shards_sender import ShardsSender
from sglang_bridge.weights.exchange import send
from tests.dist.jobs import make_learner, share
from tests.support.fake_card import CARD, FakeCard, lines_as_rows

SYNCS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "rounded": {"weight_sync": {"round_to": "int8"}},
    "quantised": {"student": {"quantization": "int8"}},
}
"""How weights are read for the servers, each with what the configuration says of it."""


@contextmanager
def device(*, card: bool) -> Iterator[FakeCard]:
    """A card, or the CPU, for a learner of this process; each rank is alone on its machine.

    What a CPU's device layer gives Megatron for random states and the norm of gradients is given to
    the card too, for CUDA's generators and TransformerEngine's kernel; and the card's attention, of
    plain operations, to the CPU.
    """
    seen = FakeCard()
    if not card:
        with sdpa_kernel(SDPBackend.MATH):
            yield seen
        return
    os.environ["LOCAL_RANK"] = "0"
    # with one generator for both devices Megatron warns of every use
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    cpu._patch_random_state()
    cpu._patch_grad_norm()
    build_model = learner_module.build_model

    def built_there(*args: Any) -> Any:
        # a real card takes over parameters that were made on the host, in place
        with torch.device(CARD):
            return build_model(*args)

    with seen, mock.patch.object(learner_module, "build_model", built_there):
        yield seen


def updates(
    out: Path,
    *,
    model: Path,
    config: dict[str, Any],
    batches: list[Batch],
    card: bool,
    estimator: dict[str, Any] | None = None,
) -> None:
    """Make an update of each batch, then read the weights as weight syncs do.

    A rank writes what it found; rank 0 the weights that all of it leads to, too.
    """
    chosen = Estimator.model_validate(estimator or {})
    with device(card=card) as seen:
        learner = make_learner(model, config)
        found: dict[str, Any] = {"updates": [], "syncs": {}}
        for batch in batches:
            mine = share(batch, learner, chosen)
            seen.lines.clear()
            metrics = learner.train(mine, chosen, 1.0)
            found["updates"].append(
                {
                    "micro_batches": sum(map(len, mine.plan)),
                    "lines": lines_as_rows(seen.lines),
                    "metrics": msgspec.to_builtins(metrics),
                }
            )
        for name, keys in SYNCS.items():
            seen.lines.clear()
            sent = weights_sent(learner, model, keys)
            found["syncs"][name] = {"sent": sent, "lines": lines_as_rows(seen.lines)}
        (out / f"rank{learner.world.rank}.json").write_text(json.dumps(found))
        learner.export_hf(out / "after", torch.float32)
    dist.destroy_process_group()


class _Taker:
    """A group in which whatever is sent has been taken at once; it keeps a digest of the bytes."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def name(self) -> str:
        return "taker"

    def send(self, wires: list[torch.Tensor], peer: int, tag: int) -> _Taker:
        (wire,) = wires
        self.digest.update(getattr(wire, "held", wire).numpy().tobytes())
        return self

    def wait(self) -> None:
        pass


def weights_sent(learner: MegatronLearner, model: Path, keys: dict[str, Any]) -> str:
    """Send this rank's part to one server; the digest of all that was sent."""
    server = {"model": str(model), "dtype": "bfloat16"}
    config = Config.model_validate(
        {
            "data": {"train": "unused"},
            "student": server | keys.get("student", {}),
            "teacher": server,
            "learner": learner.config.model_dump(),
            "weight_sync": {"bucket_bytes": 30_000} | keys.get("weight_sync", {}),
        }
    )
    learner.finish_param_gather()
    sender, taker = ShardsSender(learner.full, config), _Taker()
    sender._plan(Join("", 0, 0, "", "nccl", 1.0, (("server", 1, 1),), "bfloat16", False, ()))
    group: Any = taker
    send(group, sender._paused, learner.world.device, sender._read())
    return taker.digest.hexdigest()
