"""Admits servers to the fleets of a run under way: those that come back, and those that are new.

A new one that did not fit would end the run later. A student must hold the tensors of its model and
answer as the run will ask it; it gets new weights with the next sync. A teacher must score its own
samples as it samples them, and a passage as those score it that are there.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from megatron_opd.buffer.rejection import SampleRejected
from megatron_opd.checkpoint.claimant import Claimant
from megatron_opd.config.roles import STUDENT, Role, section_of, teacher_roles
from megatron_opd.config.rules import keyless_problem
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import is_local_url
from megatron_opd.errors import UserError
from megatron_opd.fleet.startup import ServedModel, take_in
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.inputs.teachers import check_teachers
from megatron_opd.launch.keys import named_key
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.records.types import Prompt
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.teacher_guard import ATOMS, TOKENS, bound_nats
from megatron_opd.weight_sync.holdings import as_held, server_holdings
from megatron_opd.weight_sync.quantised_pieces import CannotServe
from megatron_opd.weight_sync.shards import require_as_planned, server_layout
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import one_line
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import ScoreRequest, ServerInfo, WeightPiece
from sglang_bridge.weights.formats import Format

CUT_AS_PLANNED = ("shards", "disk")
"""Transports that reach only servers whose slices follow from their layout."""


class ServerAdmission:
    """Asks a server what it is before it is let in.

    Args:
        config: what it must be.
        prepared: the models' sizes, and prompts to try a teacher on.
        fleets: of all roles.
        claimant: the run.
        keys: of the run's own servers. One that was added has the key that api_key_env names, or
            none: the random key of those started here stays with them.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        fleets: Mapping[Role, Fleet],
        claimant: Claimant,
        keys: Mapping[Role, str | None],
    ) -> None:
        self._config, self._prepared, self._fleets = config, prepared, fleets
        self._claimant, self._keys = claimant, keys
        self._joined: set[tuple[Role, str]] = set()

    async def readmit(self, role: Role, url: str) -> ServerClient:
        """Let a server in that was lost. BridgeError, UserError: it is not what it was."""
        return await self._take_in(role, url, new=False)

    async def admit(self, role: Role, url: str) -> ServerClient:
        """Let a server in that is new to the run. BridgeError, UserError: it does not suit."""
        return await self._take_in(role, url, new=True)

    async def _take_in(self, role: Role, url: str, *, new: bool) -> ServerClient:
        config, fleet = self._config, self._fleets[role]
        joined = new or (role, url) in self._joined
        key = named_key(section_of(config, role), role) if joined else self._keys[role]
        if key is None and not (config.security.insecure or is_local_url(url)):
            raise UserError(keyless_problem(role, url))
        suits = partial(check_candidate, config, self._prepared, role, fleet) if new else None
        model = ServedModel.of(self._prepared, role)
        client = await take_in(config, role, fleet, url, key, model, self._claimant, suits)
        if new:
            self._joined.add((role, url))
        return client


async def check_candidate(
    config: Config,
    prepared: Prepared,
    role: Role,
    fleet: Fleet,
    client: ServerClient,
    info: ServerInfo,
) -> None:
    """Raise UserError for a server that a role cannot use; BridgeError: it does not answer well."""
    if role != STUDENT:
        await _check_teacher(config, prepared, role, fleet, client)
        return
    section = config.student
    spec, pieces = read_model_spec(section.model), await client.weight_pieces()
    require_tensors(info, spec, pieces, section.quantization)
    if config.weight_sync.type in CUT_AS_PLANNED:
        try:
            layout = server_layout(info)
            require_as_planned(info.url, spec, layout, pieces, section.quantization)
        except CannotServe as error:
            raise UserError(str(error)) from None
    await _sample(config, prepared, client)


def require_tensors(
    info: ServerInfo, spec: ModelSpec, pieces: Sequence[WeightPiece], format: Format | None
) -> None:
    """Raise UserError unless a server holds the tensors of this model, however it cuts them."""
    wanted: dict[str, int] = {}
    for held in as_held(server_holdings(spec, info.tp_size, info.ep_size), format):
        wanted[held.name] = max(wanted.get(held.name, 0), held.start + held.length)
    found: dict[str, int] = {}
    for piece in pieces:
        found[piece.hf_name] = max(found.get(piece.hf_name, 0), piece.start + piece.length)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UserError(
                f"{info.url} serves another model: {name} has {_rows(found.get(name))}, the run's "
                f"{_rows(wanted.get(name))}"
            )


def _rows(count: int | None) -> str:
    return "no rows" if count is None else f"{count} rows"


async def _sample(config: Config, prepared: Prepared, client: ServerClient) -> None:
    """Sample one token as the run samples responses: with its draws, and routing where replayed."""
    rollout = config.rollout.model_copy(update={"max_new_tokens": 1})
    short = config.model_copy(update={"rollout": rollout})
    name = f"join-{uuid.uuid4().hex[:8]}"
    generator = RolloutGenerator(
        short, client, prepared.student.vocab_size, name, prepared.ending.token_ids
    )
    try:
        await generator.generate(Prompt(0, "", np.zeros(2, np.int32)))
    except SampleRejected as error:
        raise UserError(f"{client.url} does not sample: {one_line(str(error))}") from None


async def _check_teacher(
    config: Config, prepared: Prepared, role: Role, fleet: Fleet, client: ServerClient
) -> None:
    """Let it score its own samples, and compare its scores with a server's that is there."""
    names = teacher_roles(config)
    asked = {name: [client] if of == role else [] for name, of in names.items()}
    # its scores are compared with those of a server that is there, below
    await check_teachers(config, prepared, asked, second=False)
    bound = bound_nats(section_of(config, role).dtype, config.scoring.temperature)
    request = _passage(prepared.vocab_sizes[role], config.scoring.temperature)
    for other in fleet.clients[:1]:
        ours, theirs = await client.score(request), await other.score(request)
        gap_nats = float(np.median(np.abs(ours.logp_N - theirs.logp_N)))
        if not gap_nats <= bound:
            raise UserError(
                f"{client.url} serves another model than {other.url}: their scores of one passage "
                f"differ by {gap_nats:.2g} nats (median; {bound:g} are allowed)"
            )


def _passage(vocab_size: int, temperature: float) -> ScoreRequest:
    """Return random tokens to be scored: mostly unlikely, by which models differ most."""
    rng = np.random.default_rng(0)
    ids_TK = rng.integers(vocab_size, size=(TOKENS, ATOMS), dtype=np.int32)
    return ScoreRequest(
        rid=f"join-{uuid.uuid4().hex[:8]}",
        input_ids=rng.integers(vocab_size, size=TOKENS + 1).tolist(),
        runs=((1, TOKENS + 1),),
        offsets_T1=np.arange(0, ids_TK.size + 1, ATOMS),
        ids_N=ids_TK.reshape(-1),
        temperature=temperature,
        exact=True,
    )
