"""A learner rank that serves a controller until it is told to stop."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from megatron_opd.checkpoint.state import LearnerState
from megatron_opd.config.schema import Config
from megatron_opd.learner.channel import Channel
from megatron_opd.learner.determinism import deterministic
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.model import DTYPES
from megatron_opd.transport.messages import (
    ConnectWeights,
    DigestPieces,
    Digests,
    Done,
    ExportHf,
    GetManifest,
    Hello,
    LoadState,
    Manifest,
    Nothing,
    Request,
    Result,
    SaveState,
    SendWeights,
    Stop,
    Train,
)
from megatron_opd.transport.rank_batch import from_frames
from megatron_opd.weight_sync.sender import WeightSender


def serve(config: Config, address: str) -> int:
    """Serve the controller at `address`; the process's exit code.

    Whatever fails is reported to the controller in one line before this rank ends; the traceback
    goes to stderr.
    """
    channel = Channel(address, first_s=config.learner.timeout_s)
    try:
        RankServer(config, channel).run()
    except Exception as error:  # noqa: BLE001  every failure must reach the controller
        channel.report(error)
        traceback.print_exc(file=sys.stderr)
        return 1
    finally:
        channel.close()
    dist.destroy_process_group()
    return 0


class RankServer:
    """Requests to methods. All ranks execute every request; rank 0 answers."""

    def __init__(self, config: Config, channel: Channel) -> None:
        self.config, self.channel = config, channel
        self.estimator = config.estimator
        settings = deterministic(config.learner) if config.run.deterministic else config.learner
        self.learner = MegatronLearner(
            config.student.model,
            settings,
            updates=config.run.updates,
            seed=config.run.seed,
        )
        self.state = LearnerState(
            self.learner.model,
            self.learner.optimizer,
            self.learner.world,
            config.learner.dtype,
            config.learner.timeout_s,
        )
        sync = config.weight_sync
        self.sender = WeightSender(self.learner.full, sync.bucket_bytes, sync.round_to)

    def run(self) -> None:
        """Answer requests until Stop."""
        world, info = self.learner.world, self.learner.info()
        self.channel.reply(Hello(world.rank, world.data_rank if world.is_head else None, info))
        while True:
            request, frames = self.channel.receive(world)
            result = self.handle(request, frames)
            if isinstance(request, Stop):
                # Nobody leaves while another rank still needs it.
                dist.barrier()
            if world.rank == 0:
                self.channel.reply(Done(request.call, result))
            if isinstance(request, Stop):
                return

    def handle(self, request: Request, frames: list[memoryview]) -> Result:
        """Execute one request on this rank."""
        match request:
            case Train():
                return self.learner.train(
                    from_frames(request.update, request.version, request.plan, frames),
                    self.estimator,
                    self.config.rollout.temperature,
                    truncated_sampler=self.config.rollout.top_p < 1,
                )
            case GetManifest():
                return Manifest(self.sender.buckets)
            case ConnectWeights():
                self.sender.connect(
                    request.host,
                    request.port,
                    request.world_size,
                    request.group_name,
                    request.timeout_s,
                )
            case SendWeights():
                self.learner.settle_weights()
                self.sender.send()
            case DigestPieces():
                self.learner.settle_weights()
                return Digests(self.sender.piece_digests(request.pieces))
            case ExportHf():
                dtype = DTYPES[request.dtype or self.config.learner.dtype]
                self.learner.export_hf(Path(request.path), dtype)
            case SaveState():
                self.learner.settle_weights()
                background = request.in_background
                self.state.save(Path(request.path), request.updates, in_background=background)
            case LoadState():
                self.state.load(Path(request.path))
            case Stop():
                self.state.wait()
                self.sender.close()
        return Nothing()
