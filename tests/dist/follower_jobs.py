"""What the ranks of a learner do in tests of teachers that follow the student."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_opd.checkpoint.stated_heads import heads_of
from megatron_opd.config.schema import Config
from megatron_opd.config.sources import AverageSource, LaggedSource, StudentSource, TeacherSource
from megatron_opd.learner.followers import FollowerWeights, kept_tensors
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.state.kept import KeptTensors
from megatron_opd.learner.state.state import LearnerState
from megatron_opd.models.gather import FullTensors
from megatron_opd.records.types import Batch
from megatron_opd.sizing.learner import follower_bytes
from megatron_opd.weight_sync.plan import ServerLayout
from megatron_opd.weight_sync.shards import Shards
from megatron_opd.weight_sync.shards_sender import ShardsSender
from tests.dist.jobs import make_learner
from tests.dist.shard_jobs import Ask, Fleet, config_of, require_held, serve
from tests.dist.state_jobs import digest, train
from tests.support.receiving import ThreadFleet

DECAY, EVERY = 0.7, 2
SOURCES: dict[str, TeacherSource] = {
    "student": StudentSource(),
    "lagged": LaggedSource(every=EVERY),
    "ema": AverageSource(decay=DECAY),
    "slow": AverageSource(decay=DECAY, every=EVERY),
}
Tensors = dict[str, torch.Tensor]


def whole(tensors: FullTensors) -> Tensors:
    """All of it on rank 0, nothing elsewhere; collective."""
    return {name: tensor.clone() for name, tensor in tensors.tensors()}


def averaged(average: Tensors, weights: Tensors, decay: float = DECAY) -> Tensors:
    """The definition, in NumPy's float32."""
    old, new = np.float32(decay), np.float32(1 - decay)
    return {
        name: torch.from_numpy(old * average[name].numpy() + new * weights[name].float().numpy())
        for name in average
    }


def same(one: Tensors, other: Tensors) -> bool:
    """Bit for bit; of the same dtype."""
    assert one.keys() == other.keys()
    return digest(one) == digest(other) and all(one[n].dtype == other[n].dtype for n in one)


def followed(
    out: Path,
    *,
    model: Path,
    config: dict[str, Any],
    batches: list[Batch],
    fleet: Fleet,
    save_after: int,
    target: Path,
) -> None:
    """Train with a teacher of every source; each version reaches servers, and outlives a loss."""
    learner = make_learner(model, config)
    followers = {name: FollowerWeights(learner.full, each) for name, each in SOURCES.items()}
    for name, follower in followers.items():
        held = sum(
            s.parameter.nbytes for each in follower.kept.values() for s in each.shards.values()
        )
        planned = follower_bytes(learner.spec, learner.config, SOURCES[name])
        assert held == planned, (name, "what opd check says")
    state = keeper(learner, followers)
    settings = config_of(model, config["parallel"], fleet, same_host="off")
    history = {0: whole(learner.full)}
    average = first = {name: tensor.float() for name, tensor in history[0].items()}
    means = {0: average}
    for updates, batch in enumerate(batches, 1):
        train(learner, [batch])
        learner.finish_param_gather()
        for follower in followers.values():
            follower.after_update(updates)
        history[updates] = whole(learner.full)
        average = means[updates] = averaged(average, history[updates])
        held = updates // EVERY * EVERY
        wanted = {
            "student": history[updates],
            "lagged": history[held],
            "ema": average,
            "slow": means[held],
        }
        for name, follower in followers.items():
            found = whole(follower.published)
            if learner.world.rank == 0:
                assert same(found, wanted[name]), (name, updates)
            if updates == len(batches):
                sent(follower.published, settings, fleet, wanted[name])
        if updates == save_after:
            state.save(target, updates, in_background=False)
            saved = digests(followers)
    last = digests(followers)
    if learner.world.rank == 0:
        # controls: another decay, one update less, the student's own weights
        other = first
        for updates in range(1, len(batches) + 1):
            other = averaged(other, history[updates], DECAY + 0.01)
        for wrong in (other, means[len(batches) - 1], history[len(batches)]):
            assert not same(average, wrong)
    facts = state.load(target)
    assert facts.updates == save_after
    assert digests(followers) == saved
    for updates, batch in enumerate(batches[save_after:], save_after + 1):
        train(learner, [batch])
        learner.finish_param_gather()
        for follower in followers.values():
            follower.after_update(updates)
    assert digests(followers) == last, "an interrupted run goes on bitwise"
    if learner.world.rank == 0:
        assert len(set(last.values())) == len(SOURCES) == 4
        (out / "result.json").write_text(json.dumps(saved))
    dist.destroy_process_group()


def loaded(out: Path, *, model: Path, config: dict[str, Any], source: Path) -> None:
    """What followers hold after a checkpoint of another layout was loaded."""
    learner = make_learner(model, config)
    followers = {name: FollowerWeights(learner.full, each) for name, each in SOURCES.items()}
    keeper(learner, followers).load(source)
    found = digests(followers)
    if learner.world.rank == 0:
        (out / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def keeper(learner: MegatronLearner, followers: dict[str, FollowerWeights]) -> LearnerState:
    """What saves and loads learner and followers."""
    kept = KeptTensors(learner.full, kept_tensors(followers))
    heads, dtype = heads_of(learner.spec), learner.config.dtype
    return LearnerState(learner.model, learner.optimizer, learner.world, dtype, heads, 60, kept)


def digests(followers: dict[str, FollowerWeights]) -> dict[str, str]:
    """Of what each follower publishes, on rank 0; collective."""
    return {name: digest(whole(follower.published)) for name, follower in followers.items()}


def sent(published: FullTensors, config: Config, fleet: Fleet, wanted: Tensors) -> None:
    """Sends it to servers, which then hold their slices of what is wanted; collective."""
    part = ShardsSender(published, config)
    serve(published, part, partial(_send, config=config, fleet=fleet, wanted=wanted), fleet)


async def _send(
    ask: Ask, full: FullTensors, *, config: Config, fleet: Fleet, wanted: Tensors
) -> None:
    servers = ThreadFleet(full.spec, [ServerLayout(*each) for each in fleet.servers], fleet.dtype)
    shards = Shards(servers, ask, config)
    await shards.open()
    for rank in servers.ranks():
        assert rank.group is not None
        rank.group.clear()
    await shards.send(1)
    require_held(servers, wanted, fleet)
    for rank in servers.ranks():
        assert rank.group is not None
        assert sum(rank.group.sizes) == rank.num_bytes, "each receives its own share, once"
    pieces = [p for found in servers.described(digests=True).values() for p in found]
    assert await ask(pieces) == [piece.digest for piece in pieces], "digests"
    await shards.close()
