"""Looks at a server that would join a run under way: one that does not fit would end the run later.

It must hold the tensors of the role's model and answer as the run will ask it. A teacher must also
hold the weights of those that are there; a student gets its own with the next weight sync.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np

from megatron_opd.buffer.rejection import SampleRejected
from megatron_opd.config.roles import STUDENT, Role, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.inputs.prepare import Prepared
from megatron_opd.inputs.teachers import check_teachers
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.records.types import Prompt
from megatron_opd.rollout.generator import make_generator
from megatron_opd.weight_sync.holdings import as_held, server_holdings
from megatron_opd.weight_sync.quantised_pieces import CannotServe
from megatron_opd.weight_sync.shards import require_as_planned, server_layout
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import one_line
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import ServerInfo, WeightPiece
from sglang_bridge.weights.formats import Format

CUT_AS_PLANNED = ("shards", "disk")
"""Transports that reach only servers whose slices follow from their layout."""


async def check_joiner(
    config: Config,
    prepared: Prepared,
    role: Role,
    fleet: Fleet,
    client: ServerClient,
    info: ServerInfo,
) -> None:
    """Raise UserError for a server that a role cannot use; BridgeError: it does not answer well."""
    section = section_of(config, role)
    spec, pieces = read_model_spec(section.model), await client.weight_pieces()
    require_tensors(info, spec, pieces, section.quantization)
    if role != STUDENT:
        await _check_teacher(config, prepared, role, fleet, client)
        return
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
    generator = make_generator(
        short, client, prepared.student.vocab_size, name, prepared.ending.token_ids
    )
    try:
        await generator.generate(Prompt(0, "", np.zeros(2, np.int32)))
    except SampleRejected as error:
        raise UserError(f"{client.url} does not sample: {one_line(str(error))}") from None


async def _check_teacher(
    config: Config, prepared: Prepared, role: Role, fleet: Fleet, client: ServerClient
) -> None:
    """Let it score its own samples, and compare its weights with a server's that is there."""
    names = teacher_roles(config)
    asked = {name: [client] if of == role else [] for name, of in names.items()}
    # its weights are compared with a server's that is there, below
    await check_teachers(config, prepared, asked, second=False)
    for other in fleet.clients[:1]:
        ours, theirs = await client.weight_digests(), await other.weight_digests()
        known = {_slice(piece): piece.digest for piece in theirs}
        for piece in ours:
            if known.get(_slice(piece), piece.digest) != piece.digest:
                raise UserError(
                    f"{client.url} serves another model than {other.url}: {piece.hf_name} differs"
                )


def _slice(piece: WeightPiece) -> tuple[str, int, int, int, str]:
    """Name a slice; servers of other layouts have at least the norms in common."""
    return piece.hf_name, piece.dim, piece.start, piece.length, piece.dtype
