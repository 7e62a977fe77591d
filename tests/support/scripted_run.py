"""A whole `opd run` or `opd control` in one process: its servers and its learner follow a script.

As their real ones they end because of others: the learner exits with EXIT_LOST once the controller
has closed its socket, and what is stopped has ended by a signal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_opd.checkpoint.run_lock import RunLock
from megatron_opd.config.roles import run_roles
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import NOTHING_YET
from megatron_opd.errors import LearnerError
from megatron_opd.evaluation.progress import EvaluationProgress
from megatron_opd.fleet import clients
from megatron_opd.inputs import teachers as teacher_guard
from megatron_opd.inputs.kept_data import Begun, KeptData, Shape
from megatron_opd.inputs.prepare import prepare
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.inputs.second_pass import SecondPass
from megatron_opd.metrics import summary as figures
from megatron_opd.metrics.persist import dump_totals
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Accounting
from megatron_opd.rollout.resumed import ResumeCounts
from megatron_opd.run import attempt, own_servers, ready, run, start
from megatron_opd.run.resume import Resumption
from megatron_opd.run.stages import Ready
from megatron_opd.sim.clock import run_virtual
from megatron_opd.transport.messages import LearnerInfo
from megatron_opd.transport.remote_learner import Admission
from megatron_opd.wire.keys import RunKeys
from sglang_bridge.claims import Claim
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.lifetime import EXIT_LOST
from sglang_bridge.protocol import (
    DrawCache,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    ServerEnds,
    ServerInfo,
    WeightPiece,
)

KILLED, STOPPED = -9, -15
ACCOUNTING = Accounting(
    updates=1, version=1, admitted=8, consumed=8, dropped={}, in_flight=0, interrupted=False
)


class Process:
    """A process that ends as it is told; a handles.Server and a handles.Learner."""

    def __init__(self, name: str, url: str, log: Path) -> None:
        self.name, self.url, self.log_path, self.log = name, url, log, log
        self.code: int | None = None
        self.runs = False

    def start(self) -> None:
        self.runs = True

    def end(self, code: int) -> None:
        """End, unless it has."""
        if self.runs and self.code is None:
            self.code = code

    def wait_ready(self, timeout_s: float) -> None:
        """It is."""

    def exit_code(self) -> int | None:
        return self.code

    def cause(self) -> str | None:
        return None

    def stop(self, grace_s: float) -> None:
        self.end(STOPPED)


@dataclass
class Script:
    """What the parts of one run share. urls: of servers elsewhere."""

    config: Config
    processes: list[Process] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    remotes: list[Remote] = field(default_factory=list)
    workers: list[Workers] = field(default_factory=list)

    def kill(self, what: str) -> None:
        """Kill the processes whose names begin so."""
        for process in self.processes:
            if process.name.startswith(what):
                process.end(KILLED)

    def left(self) -> list[str]:
        """Return what was not ended."""
        found = [p.name for p in self.processes if p.runs and p.code is None]
        found += [client.url for client in self.clients if not client.closed]
        found += ["the learner's socket" for remote in self.remotes if not remote.closed]
        return found + ["the data workers" for each in self.workers if not each.stopped]


class Machines:
    """Where the script's processes are; launch.machines.Machines."""

    learner_here = True
    line = None

    def __init__(self, script: Script, *, starts: bool) -> None:
        self.script, self.config, self.starts = script, script.config, starts

    def servers(self, role: str, logs: Path, api_key: str | None) -> list[Process]:
        section = getattr(self.config, role)
        if section.urls or not self.starts:
            return []
        url = f"http://127.0.0.1:{len(self.script.processes) + 1}"
        server = Process(f"{role} server {url}", url, logs / f"{role}-0.log")
        self.script.processes.append(server)
        return [server]

    def learner(self, file: Path, controller: str, keys: Any, log: Path) -> Process | None:
        if not self.starts:
            return None
        learner = Process("the learner", "", log)
        self.script.processes.append(learner)
        return learner


class Remote:
    """The learner's socket; transport.zmq.RemoteLearner."""

    address, ready, frames_refused, failure = "tcp://127.0.0.1:1", True, 0, None
    info = LearnerInfo(1, 1, 1, 1, "float32", "gloo", "cpu")

    def __init__(self, script: Script, *_: object) -> None:
        self.script, self.closed = script, False
        script.remotes.append(self)

    async def _done(self, *_: object, **__: object) -> Any:
        await asyncio.sleep(0.1)

    wait_ready = move_weights = load_state = export_hf = save_state = _done

    async def failed(self) -> LearnerError:
        await asyncio.sleep(1e6)
        raise AssertionError("it never fails by itself")

    async def piece_digests(self, pieces: Iterable[Any]) -> list[str]:
        return ["1" for _ in pieces]

    async def stop(self) -> None:
        for process in self.script.processes:
            if process.name == "the learner":
                process.end(0)
        self.close()

    def close(self) -> None:
        self.closed = True
        for process in self.script.processes:
            if process.name == "the learner":
                process.end(EXIT_LOST)


class Client:
    """A server that answers everything; sglang_bridge.client.ServerClient."""

    def __init__(
        self, script: Script, vocab_size: int, late: bool, section: Any, url: str, *_: Any
    ) -> None:
        self._late = late
        self.url, self.closed, self.known_version = url, False, 0
        info = ServerInfo(url, "elsewhere", vocab_size, 2048, 1, 1, 0, section.dtype, 9999, False)
        self._info = replace(info, ends=ServerEnds((1,), (1,)))
        self.claims: list[Claim] = []
        script.clients.append(self)

    async def _done(self, *_: object, **__: object) -> None:
        await asyncio.sleep(0.1)

    pause = resume = flush_cache = begin_weight_update = abort_all = _done
    abandon_weight_update = _done

    async def info(self) -> ServerInfo:
        await asyncio.sleep(0.1)
        if self._late:
            self._late = False
            raise ServerUnreachable(self.url, "/server_info", "not yet", sent=False)
        return self._info

    async def alive(self) -> bool:
        return True

    async def claim(self, claim: Claim) -> None:
        await asyncio.sleep(0.1)
        self.claims.append(claim)

    async def close(self) -> None:
        self.closed = True

    async def version(self) -> int:
        return self.known_version

    async def end_weight_update(self, version: int) -> None:
        self.known_version = version

    async def weight_digests(self, *, staged: bool = False) -> list[WeightPiece]:
        return [WeightPiece(0, "w", 0, 0, 1, "float32", "1")]

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        await asyncio.sleep(0.1)
        ids_T = np.array([4, 5, 6], np.int32)
        cache = DrawCache(
            offsets_T1=np.arange(4, dtype=np.int64),
            ids_N=ids_T,
            weight_N=np.ones(3, np.float32),
            sampler_logp_N=np.array([-0.1, -2.0, -5.0], np.float32),
            path_T=np.arange(3, dtype=np.int64),
        )
        draws = cache if request.keeps_cache else None
        return RolloutReply(ids_T, "stop", draws, ((self.known_version, 0, 3),), self.url)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        await asyncio.sleep(0.1)
        return ScoreReply(np.array([-0.1, -2.0, -5.0], np.float32))


class Transport:
    """Moves nothing; weight_sync.transport.FleetPart."""

    tensors, num_bytes, stages = frozenset({"w"}), 4, False

    def __init__(self, *_: object) -> None: ...

    async def _done(self, *_: object) -> None:
        await asyncio.sleep(0.1)

    open = reopen = stage = send = close = _done


class Workers:
    """Data workers that are there at once; launch.data_workers.DataWorkers."""

    def __init__(self, script: Script, *_: object) -> None:
        connections = SimpleNamespace(refusals=SimpleNamespace(count=0))
        self.pool, self.stopped = (
            SimpleNamespace(connections=connections, workers_lost=0, fetch=None, sample=None),
            False,
        )
        script.workers.append(self)

    def start(self, config_file: Path) -> None: ...

    async def ready(self, timeout_s: float) -> None:
        await asyncio.sleep(0.1)

    async def stop(self) -> None:
        self.stopped = True


class Sites:
    """Sites that send what is needed; sites.learner_side.SitesOfRun."""

    def __init__(self, *_: object) -> None:
        self.weights = SimpleNamespace(
            sync=self._done, make_room=self._done, serve_on=self._serve_on
        )
        self.resumed = ResumeCounts()

    async def _done(self, *_: object) -> None:
        await asyncio.sleep(0.1)

    open = wait_ready = start_over = farewell = farewell_received = close = _done
    remove_server = _done

    def engines(self) -> Any:
        return SimpleNamespace(rollout=None, teacher=None, hold=None, turns=None)

    def columns(self) -> dict[str, Any]:
        return {}

    async def _serve_on(self, *_: object) -> None:
        await asyncio.sleep(1e6)

    def summary(self) -> dict[str, Any]:
        return {}


class Updates:
    """The loops of the controller, up to the first update."""

    accounting, next_uid = ACCOUNTING, 8

    async def run(self) -> None:
        await asyncio.sleep(0.1)

    def end_early(self) -> None:
        """They are few."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. left: what it did not end. told: the error's line."""

    ended: BaseException | None
    summary: dict[str, Any] | None
    left: list[str]
    said: str

    @property
    def cause(self) -> str | None:
        return None if self.summary is None else self.summary["cause"]


@dataclass(frozen=True)
class Scene:
    """A run of the script. starts: its processes; else they are started elsewhere. late: at
    first no server answers."""

    config: Config
    prepared: Prepared
    starts: bool = True
    resumes: bool = False
    late: bool = False


async def _inline(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


async def _second_pass(_: object, passages: Sequence[ScoreRequest]) -> SecondPass:
    await asyncio.sleep(0.1)
    return SecondPass("a script", logp=(np.zeros(3, np.float32),) * len(passages))


def patched(patch: pytest.MonkeyPatch, script: Script, scene: Scene) -> None:
    """Put the script in the place of engines and processes."""
    vocab_size = scene.prepared.student.vocab_size
    patch.setattr(asyncio, "to_thread", _inline)  # a thread would work in no virtual time
    patch.setattr(ready, "RemoteLearner", partial(Remote, script))
    patch.setattr(clients, "make_client", partial(Client, script, vocab_size, scene.late))
    patch.setattr(start, "DataWorkers", partial(Workers, script))
    patch.setattr(teacher_guard, "second_pass", _second_pass)
    kind = SimpleNamespace(fleet_part=Transport)
    patch.setattr(own_servers, "transport_kind", lambda _: kind)
    patch.setattr(attempt, "Controller", lambda *_: Updates())
    patch.setattr(start, "SitesOfRun", Sites)
    patch.setattr(figures, "commit", str)  # git and the packages take a quarter of a run here
    patch.setattr(figures, "versions", dict)


def perform(scene: Scene, directory: Path, script: Script) -> Outcome:
    """Perform a run in a new directory."""
    config = scene.config
    admission = Admission(RunKeys.make(dict.fromkeys(run_roles(config), "key")))
    console = Console(file=(directory.parent / f"{directory.name}.out").open("w"))
    machines: Any = Machines(script, starts=scene.starts)
    resumed = None
    ended: BaseException | None = None
    with RunLock.take(directory):
        if scene.resumes:
            resumed = resumption(directory, ("http://127.0.0.1:1",), config.rollout.group_size)
        made: list[Ready] = []

        async def main() -> None:
            roles = run_roles(config)
            made.append(
                ready.get_ready(machines, scene.prepared, admission, roles, console, resumed)
            )
            await run.run(made[0])

        try:
            run_virtual(main())
        except BaseException as error:  # noqa: BLE001
            ended = error
        said = directory.parent / f"{directory.name}.out"
        console.file.close()
        summary = _summary(made[0].run_dir.summary) if made[0].directory.taken else None
    return Outcome(ended, summary, script.left(), said.read_text())


def _summary(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"cause": "no summary", "status": ""}


def resumption(directory: Path, engines: Sequence[str], group_size: int) -> Resumption:
    """A checkpoint to continue from, as far as the script looks at it."""
    (directory / "config.resolved.yaml").write_text("{}")
    extras: dict[str, Any] = {"elapsed_s": 0.0, "wall_s": 0.0, "resumed_at_updates": []}
    extras |= {"evaluations": EvaluationProgress().as_json()}
    extras["totals"] = dump_totals(RunTotals(engines, group_size), 0.0)
    begun = Begun(NOTHING_YET, KeptData((), Shape((), (), ())), (), (), accepted=False)
    return Resumption(directory / "none", NOTHING_YET, extras, (), begun)


def in_directory(scene: Scene, directory: Path) -> Scene:
    """Return the scene in a directory of its own."""
    run_section = scene.config.run.model_copy(update={"dir": directory})
    return replace(scene, config=scene.config.model_copy(update={"run": run_section}))


def scene(tree: dict[str, Any], **more: Any) -> Scene:
    """A scene of a configuration."""
    config = Config.model_validate(tree)
    return Scene(config, prepare(config), **more)
