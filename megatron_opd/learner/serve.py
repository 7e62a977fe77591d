"""Runs a learner rank that serves a controller until it is told to stop."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from megatron_opd.checkpoint.run_lock import LockClaim
from megatron_opd.checkpoint.stated_heads import heads_of
from megatron_opd.config.digests import learner_digests
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.roles import STUDENT, followers
from megatron_opd.config.schema import Config
from megatron_opd.learner.channel import ControllerChannel, ControllerLost, NotWelcome
from megatron_opd.learner.followers import FollowerWeights, kept_tensors
from megatron_opd.learner.learner import MegatronLearner, NotFinite
from megatron_opd.learner.memory import UpdateMemory
from megatron_opd.learner.model import DTYPES
from megatron_opd.learner.reading import Collect, ShareReader
from megatron_opd.learner.share_collector import Collector
from megatron_opd.learner.state.kept import KeptTensors
from megatron_opd.learner.state.state import LearnerState
from megatron_opd.metrics.mismatch_gap import ModelsDiffer
from megatron_opd.models.shared_ids import num_shared_ids
from megatron_opd.models.spec import read_model_spec
from megatron_opd.transport.frames import MIN_FRAME_BYTES, largest_frame_bytes
from megatron_opd.transport.messages import (
    DigestPieces,
    Digests,
    ExportHf,
    LoadState,
    MissingSamples,
    MoveWeights,
    Nothing,
    Offload,
    Onload,
    RankDone,
    RankHello,
    Refusal,
    Request,
    Result,
    SaveState,
    ScoreShare,
    Stop,
    Train,
    WeightsMoved,
)
from megatron_opd.weight_sync.digests import piece_digests
from megatron_opd.weight_sync.following import as_students
from megatron_opd.weight_sync.transport import transport_kind
from megatron_opd.wire.keys import RankKeys, rank_keys

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
DETERMINISTIC = {
    # TransformerEngine: no kernels whose backward pass adds atomically
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # cuBLAS: workspaces of fixed size, because concurrent streams otherwise share one
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # one order of addition, whatever the message's size
    "NCCL_ALGO": "Ring",
}


def serve(config: Config, address: str) -> int:
    """Serve the controller at `address`; return the process's exit code.

    Whatever fails is reported to the controller in one line before this rank ends; the traceback
    goes to stderr. So does the report of a controller that is gone or rejects this rank.
    """
    rank_keys(config.run.dir)  # bad ones are this machine's mistake: before anything waits
    max_bytes = _largest_frame(config)

    def keys() -> RankKeys | None:
        return rank_keys(config.run.dir)

    collector = Collector(keys, max_bytes, config.learner.timeout_s)
    channel = ControllerChannel(
        address, keys, first_s=config.learner.timeout_s, max_bytes=max_bytes
    )
    try:
        RankServer(config, channel, collector.frames).run()
    except (NotWelcome, ControllerLost) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT if isinstance(error, NotWelcome) else EXIT_FAILED
    except Exception as error:  # noqa: BLE001  every failure must reach the controller
        channel.leave()  # the controller ends once it has this answer, which is no failure here
        channel.report(error, final=_would_fail_again(error))
        traceback.print_exc(file=sys.stderr)
        return EXIT_FAILED
    finally:
        channel.close()
        collector.close()
    dist.destroy_process_group()
    return 0


def _would_fail_again(error: Exception) -> bool:
    """Return whether another learner would end so: not for a lost peer or a full disk."""
    return isinstance(error, NotFinite) or not isinstance(error, RuntimeError | OSError)


def _largest_frame(config: Config) -> int:
    """Return the bytes of the largest frame that this rank accepts."""
    try:
        spec = read_model_spec(config.student.model)
    except ValueError:
        return MIN_FRAME_BYTES  # loading the model will say what is wrong with it
    experts = sum(spec.moe_layers) * spec.experts_per_token
    return largest_frame_bytes(config, spec.vocab_size, experts)


class RankServer:
    """Executes requests on all ranks; rank 0 answers. collect: see ShareReader."""

    def __init__(self, config: Config, channel: ControllerChannel, collect: Collect) -> None:
        self.config, self.channel = config, channel
        self.estimator = config.estimator
        settings = deterministic(config.learner) if config.run.deterministic else config.learner
        self.learner = MegatronLearner(
            config.student.model,
            settings,
            updates=config.run.max_steps,
            seed=config.run.seed,
            num_ids=num_shared_ids(config),
        )
        self.followers = {
            role: FollowerWeights(self.learner.full, source)
            for role, source in followers(config).items()
        }
        self.state = LearnerState(
            self.learner.model,
            self.learner.optimizer,
            self.learner.world,
            config.learner.dtype,
            heads_of(self.learner.spec),
            config.learner.timeout_s,
            self._kept(),
        )
        sampled = self.estimator.support.owner == "student"
        self.shares = ShareReader(self.learner, sampled=sampled, collect=collect)
        self.claim: LockClaim | None = None
        self.memory = UpdateMemory(
            self.learner.model, self.learner.optimizer, self.learner.world.device
        )
        if config.schedule.time_shared:
            self.memory.offload()  # the servers sample first
        make_part = transport_kind(config.weight_sync).learner_part
        self.senders = {STUDENT: make_part(self.learner.full, config)}
        for role, follower in self.followers.items():
            self.senders[role] = make_part(follower.published, as_students(config, role))

    def _kept(self) -> KeptTensors | None:
        """Return what followers add to the learner's state."""
        tensors = kept_tensors(self.followers)
        return KeptTensors(self.learner.full, tensors) if tensors else None

    def run(self) -> None:
        """Answer requests until Stop."""
        world = self.learner.world
        self._join()
        while True:
            request, frames = self.channel.receive(world)
            result = self.handle(request, frames)
            if isinstance(request, Stop):
                self.channel.leave()
                # Another rank may still be in a collective that needs this one.
                dist.barrier()
            if world.rank == 0:
                self.channel.reply(RankDone(request.call, result))
            if isinstance(request, Stop):
                return

    def _join(self) -> None:
        """Join the controller. NotTheHolder: this rank does not see its run directory."""
        world, info = self.learner.world, self.learner.info()
        data_rank = world.data_rank if world.is_head else None
        hello = RankHello(world.rank, data_rank, info, learner_digests(self.config))
        welcome = self.channel.join(hello)
        if welcome.lock is None:
            return
        claim = LockClaim(Path(welcome.lock), welcome.claim)
        if world.rank == 0 or welcome.shared:
            claim.check()
        self.claim = self.state.claim = claim

    def _check_claim(self) -> None:
        if self.claim is not None:
            self.claim.check()

    def handle(self, request: Request, frames: list[memoryview]) -> Result:
        """Execute one request on this rank. frames: the raw ones, on heads alone."""
        match request:
            case Train():
                began_s = time.process_time()
                batch = self.shares.read(request, frames)
                if batch is None:
                    return MissingSamples()
                self.memory.onload()
                try:
                    metrics = self.learner.train(
                        batch,
                        self.estimator,
                        self.config.rollout.temperature,
                        truncated_sampler=self.config.rollout.top_p < 1,
                        bound=request.bound,
                    )
                except ModelsDiffer as error:  # on every rank alike: what is compared is global
                    return Refusal(error.gap)
                self._follow(request.update + 1)
                if self.learner.world.device.type != "cpu":
                    return metrics
                return msgspec.structs.replace(metrics, cpu_s=time.process_time() - began_s)
            case ScoreShare():
                batch = self.shares.read(request, frames)
                assert batch is not None, "its frames come with it"
                return self.learner.score(
                    batch, self.config.rollout.temperature, replay=request.replay
                )
            case MoveWeights():
                self.learner.finish_param_gather()
                return WeightsMoved(self.senders[request.role].handle(request.payload))
            case DigestPieces():
                self.learner.finish_param_gather()
                config, source = self.config, self.senders[request.role].source
                if request.role != STUDENT:
                    config = as_students(config, request.role)
                student = config.student
                held = (config.weight_sync.round_to, student.quantization, student.dtype)
                return Digests(piece_digests(source, request.pieces, *held))
            case ExportHf():
                dtype = DTYPES[request.dtype or self.config.learner.dtype]
                path, template = Path(request.path), request.chat_template
                ends = self.config.rollout.stop_token_ids
                self.learner.export_hf(path, dtype, self._check_claim, template, ends)
            case SaveState():
                self.learner.finish_param_gather()
                background = request.in_background
                self.state.save(Path(request.path), request.updates, in_background=background)
            case LoadState():
                self.memory.onload()
                self.state.load(Path(request.path))
            case Offload():
                self.memory.offload()
            case Onload():
                self.memory.onload()
            case Stop():
                self.state.wait()
                for sender in self.senders.values():
                    sender.close()
        return Nothing()

    def _follow(self, updates: int) -> None:
        """Let what teachers follow with see the weights after so many updates."""
        if any(follower.kept for follower in self.followers.values()):
            self.learner.finish_param_gather()
            for follower in self.followers.values():
                follower.after_update(updates)


def deterministic(config: LearnerConfig) -> LearnerConfig:
    """Return `config` for a process with repeatable updates; call before CUDA is used.

    On a CPU they are so by themselves: every sum has one order, which depends on the batch and the
    layout alone. On a GPU some kernels add in the order in which threads arrive; an operation that
    cannot be repeated then raises RuntimeError, and what the user set in the environment is kept.
    """
    if not torch.cuda.is_available():
        return config
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    return config.model_copy(update={"megatron": {**config.megatron, "deterministic_mode": True}})
