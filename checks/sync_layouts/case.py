"""One case of `python -m checks sync_layouts`: real processes up, one weight sync, compared.

python -m checks.sync_layouts.case CASE.json

CASE.json: {config, old, out}; config.student.model is the learner's checkpoint, `old` that
of the servers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from harness.case_rows import case_main
from harness.weights import shard_bytes
from harness.world import fleet_of, learner_world, started_world, with_model
from megatron_opd.config.schema import Config
from megatron_opd.launch.servers import server_processes
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.weight_sync.session import WeightSync
from megatron_opd.weight_sync.transport import transport_kind
from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import ScoreRequest

SEQUENCES, PROMPT, RESPONSE = 4, 5, 40
Tree = dict[str, Any]


async def run(asked: Tree, scratch: Path) -> Tree:
    """Start everything, sync once, compare, stop everything."""
    config = Config.model_validate(asked["config"])
    spec = read_model_spec(config.student.model)
    sequences = fixed_sequences(spec)
    reference = reference_logp(config.student.model, sequences)
    loaded = None
    if config.student.dtype != "float32":
        loaded = await logp_of_loaded(config, sequences, scratch)
    learner = remote, _ = learner_world(config, scratch)
    servers = server_processes(with_model(config, asked["old"]), "student", scratch)
    async with started_world(servers, learner) as up, fleet_of(config, up) as fleet:
        before = [await scores(client, sequences) for client in fleet.clients]
        transport = transport_kind(config.weight_sync).fleet_part(
            fleet, remote.move_weights, config
        )
        session = WeightSync(fleet, remote, transport, config.weight_sync)
        await session.open()
        report = await session.sync(1)  # compares the digests of every slice
        after = [await scores(client, sequences) for client in fleet.clients]
        pieces = await fleet.weight_digests()
        expected = loaded if loaded is not None else reference
        return {
            "sync_s": report.seconds,
            "paused_s": report.paused_s,
            "error_nats": max(float(np.abs(found - expected).max()) for found in after),
            "error_of_old_weights_nats": min(
                float(np.abs(found - expected).max()) for found in before
            ),
            "received_bytes": transport.num_bytes,
            "shard_bytes": max(max(shard_bytes(spec, held)) for held in pieces.values()),
        }


def fixed_sequences(spec: ModelSpec) -> np.ndarray:
    """Random ids, int32 [SEQUENCES, PROMPT + RESPONSE]."""
    random = np.random.default_rng(1)
    size = (SEQUENCES, PROMPT + RESPONSE)
    return random.integers(0, spec.vocab_size, size).astype(np.int32)


async def scores(client: ServerClient, sequences: np.ndarray) -> np.ndarray:
    """Log-probs of every response token, float32 [SEQUENCES, RESPONSE], one request at a time."""
    return np.stack(
        [
            (await client.score(request_of(number, ids))).logp_N
            for number, ids in enumerate(sequences)
        ]
    )


def request_of(number: int, ids: np.ndarray) -> ScoreRequest:
    """Asks for the log-prob of each response token."""
    return ScoreRequest(
        rid=f"fixed-{number}",
        input_ids=ids,
        runs=((PROMPT, PROMPT + RESPONSE),),
        offsets_T1=np.arange(RESPONSE + 1, dtype=np.int64),
        ids_N=ids[PROMPT:],
        temperature=1.0,
    )


async def logp_of_loaded(config: Config, sequences: np.ndarray, scratch: Path) -> np.ndarray:
    """The same log-probs by a server that loaded the learner's checkpoint."""
    section = config.student.model_copy(update={"servers": 1})
    alone = config.model_copy(update={"student": section})
    servers = server_processes(alone, "student", scratch / "loaded")
    async with started_world(servers) as up, fleet_of(alone, up) as fleet:
        return await scores(fleet.clients[0], sequences)


def reference_logp(model: Path, sequences: np.ndarray) -> np.ndarray:
    """The same log-probs by transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        ids = torch.from_numpy(sequences).long()
        logp = reference(ids).logits.log_softmax(-1)[:, PROMPT - 1 : -1]
        return logp.gather(-1, ids[:, PROMPT:, None])[..., 0].numpy()


if __name__ == "__main__":
    case_main(run)
