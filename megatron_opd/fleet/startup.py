"""Waits for what a command needs: its servers, here or elsewhere, and its learner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_opd.checkpoint.claimant import Claimant
from megatron_opd.config.roles import STUDENT, Role, gets_weights, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.errors import LearnerError, UserError
from megatron_opd.fleet.clients import make_client
from megatron_opd.fleet.guards import RunGuard, watched_engines
from megatron_opd.inputs.model_facts import check_window
from megatron_opd.inputs.models import check_ends
from megatron_opd.inputs.notes import served_gaps
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.launch.health import HealthGuard
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.readiness import StartingPart, all_ready, ready_now, servers_ready
from megatron_opd.models.spec import ModelSpec
from megatron_opd.transport.remote_learner import RemoteLearner
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError, one_line
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import ServerInfo


async def all_up(
    remote: RemoteLearner | None,
    startup_s: float,
    parts: Mapping[str, StartingPart],
    say: Callable[[str], None],
) -> None:
    """Wait for the learner, if there is to be one, and `parts`; each that is there is watched."""
    learner: dict[str, StartingPart] = {}
    if remote is not None:
        watch = RunGuard(HealthGuard, remote).watch
        learner["the learner"] = StartingPart(remote.wait_ready(startup_s), watch)
    try:
        await all_ready({**parts, **learner}, say)
    except LearnerError as error:
        raise UserError(f"the learner did not start: {error}") from error


async def start_all(
    config: Config,
    processes: Processes,
    fleets: Mapping[Role, Fleet],
    remote: RemoteLearner | None,
    say: Callable[[str], None],
) -> None:
    """Start processes, and wait until they are up; servers elsewhere are watched meanwhile.

    remote: the learner; None: a command without one.
    """
    processes.start()
    limits = [section_of(config, role).startup_timeout_s for role in fleets]
    startup_s = max(limits, default=config.student.startup_timeout_s)
    parts = processes.parts(startup_s)
    parts["servers elsewhere"] = StartingPart(ready_now(), watch_elsewhere(processes, fleets))
    await all_up(remote, startup_s, parts, say)


def watch_elsewhere(
    processes: Processes, fleets: Mapping[Role, Fleet]
) -> Callable[[], Awaitable[None]]:
    """Return what watches the servers that are none of these processes, by asking them."""
    ours = {server.url for server in processes.servers}
    return HealthGuard(engines=watched_engines(fleets, besides=ours)).watch


async def join_role(
    config: Config,
    role: Role,
    fleet: Fleet,
    model: ServedModel,
    claimant: Claimant,
    wait_s: float = 0.0,
    *,
    used: bool = False,
) -> list[str]:
    """Ask a role's servers what they are, and claim them; those elsewhere may be another model's.

    claimant: the run. wait_s: how long they may take to answer at all. used: they may hold any
    version, as an earlier controller of this run left them. Returns a note for each way in which
    students elsewhere are not cut as the learner. UserError: one is not what the role needs.
    """
    section = section_of(config, role)
    claim = claimant.claim(writes=gets_weights(config, role))
    try:
        infos = await servers_ready(fleet, wait_s, used=used, claim=claim)
    except BridgeError as error:
        if not section.urls:
            raise
        raise UserError(f"{role}.urls: {one_line(str(error))}") from error
    fixed, fresh = config.run.deterministic, not used
    key = f"{role}.urls" if section.urls else role
    for info in infos:
        check_served(key, info, section, model, deterministic=fixed, fresh=fresh)
    if model.trained is None or not section.urls:
        return []
    return [line for info in infos for line in served_gaps(config, model.trained, info)]


async def take_in(
    config: Config,
    role: Role,
    fleet: Fleet,
    url: str,
    api_key: str | None,
    model: ServedModel,
    claimant: Claimant,
    suits: Callable[[ServerClient, ServerInfo], Awaitable[None]] | None = None,
) -> ServerClient:
    """Add a server to its fleet: one that came back, or, with `suits`, one that is new to the run.

    claimant: the run. suits: raises for a new server that the run cannot use, whose weights are
    those it started with. Returns its client. BridgeError, UserError: it is not what the role
    needs.
    """
    section, new = section_of(config, role), suits is not None
    client = make_client(section, url, api_key)
    try:
        info = await client.info()
        await client.claim(claimant.claim(writes=gets_weights(config, role)))
        deterministic = config.run.deterministic
        check_served(role, info, section, model, deterministic=deterministic, fresh=new)
        if model.trained is not None:
            served_gaps(config, model.trained, info)  # raises where match: require
        if suits is not None:
            await suits(client, info)
        fleet.add(client, info)
    except BaseException:
        await client.close()
        raise
    return client


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Says what a server of a role must serve. ends: what ends a response of the model.

    trained: the model, of a student, whose servers' layout is compared with the learner's.
    """

    vocab_size: int
    ends: EndTokens
    trained: ModelSpec | None = None

    @classmethod
    def of(cls, prepared: Prepared, role: Role) -> ServedModel:
        """Return what a role's servers must serve in a run."""
        trained = prepared.student.spec if role == STUDENT else None
        return cls(prepared.vocab_sizes[role], prepared.ends[role], trained)


def check_served(
    key: str,
    info: ServerInfo,
    section: ServerConfig,
    model: ServedModel,
    *,
    deterministic: bool,
    fresh: bool = True,
) -> None:
    """Check that a server serves the configured model. Raises UserError.

    model: the one of the configuration.
    deterministic: it must have been started so. fresh: its weights must be those it started with.
    Of a server without the plugin its words are few: what it scores, the guard looks at.
    """
    served = Path(info.model_path)
    # a path on another machine cannot be compared
    if info.model_path and served.exists() and served.resolve() != section.model.resolve():
        raise UserError(f"{key}: {info.url} must serve {section.model}, got {served}")
    if not section.speaks_bridge:
        return
    if info.vocab_size != model.vocab_size:
        raise UserError(
            f"{key}: {info.url} must serve a vocabulary of {model.vocab_size} ids, got "
            f"{info.vocab_size}; start it with `opd serve` on a machine with every role's model"
        )
    if info.dtype != section.dtype:
        raise UserError(f"{key}: {info.url} must serve {section.dtype}, got {info.dtype}")
    if info.quantization != section.quantization:
        wanted, found = section.quantization or "none", info.quantization or "none"
        raise UserError(f"{key}: {info.url} must hold quantization {wanted}, got {found}")
    if fresh and info.version != 0:
        raise UserError(
            f"{key}: {info.url} already holds version {info.version} of another run: restart it"
        )
    if deterministic and not info.deterministic:
        raise UserError(
            f"{key}: {info.url} must be started with --enable-deterministic-inference, as "
            "run.deterministic is true"
        )
    check_ends(key, info, model.ends)
    if model.trained is not None:
        where = f"start {info.url} with --context-length {model.trained.window_limit}"
        check_window("the servers' context", model.trained, info.context_length, where)
