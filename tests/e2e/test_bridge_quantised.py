"""Servers that hold quantised matrices: what they hold, compute and receive, bit for bit."""

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import read_model_spec
from megatron_opd.weight_sync.plan import ServerLayout, SyncPlan, SyncSettings, plan_sync
from megatron_opd.weight_sync.shards import require_as_planned
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import ServerEnds
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.weights.exchange import send
from sglang_bridge.weights.formats import Format
from tests.e2e.conftest import running, tiny_spec
from tests.e2e.replies import ends_read_back, requests_of, span_error
from tests.e2e.weight_sync import differing, join, load_tensors, perturbed_copy, shards_of
from tests.support.figures import bounded
from tests.support.models import tiny_qwen2, tiny_qwen3_moe, write_tokenizer
from tests.support.oracles import load_reference
from tests.support.quantised import dequantised_oracle, held_oracle

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TOLERANCE = 1e-5
# what SGLang on a CPU would not pad over 4 ranks
WIDE = {"num_key_value_heads": 4, "moe_intermediate_size": 128}


@dataclass(frozen=True)
class Case:
    """A server. With tp > ep > 1 its ranks split the experts, and cut each of them too."""

    model: str
    format: Format
    tp: int
    ep: int


CASES = [Case("dense", "fp8", 1, 1), Case("moe", "int8", 4, 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """No file of the dense one names the end <|eom_id|>, which SGLang takes from a tokenizer."""
    base = tmp_path_factory.mktemp("quantised")
    dense = tiny_qwen2(base / "dense", seed=11, eos_token_id=[1, 500])
    (dense / "generation_config.json").unlink()
    write_tokenizer(dense, special="<|eom_id|>")
    return {
        "dense": dense,
        "moe": tiny_qwen3_moe(base / "moe", seed=12, **WIDE),
    }


@pytest.fixture(params=CASES, ids=lambda case: f"{case.model}-{case.format}-tp{case.tp}ep{case.ep}")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def server(case: Case, models: Mapping[str, Path], tmp_path: Path) -> Iterator[ServerProcess]:
    options = {"tp": case.tp, "ep": case.ep, "quantization": case.format, "group_timeout_s": 20}
    spec = tiny_spec(models[case.model], "student", **options)
    with running(spec, tmp_path / "server.log") as process:
        yield process


def dequantised_copy(model: Path, path: Path, held: Mapping[str, torch.Tensor]) -> Path:
    """The checkpoint with the weights that a server computes with."""
    shutil.copytree(model, path)
    tensors = {name: tensor.contiguous() for name, tensor in dequantised_oracle(held).items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def plan_of(model: Path, case: Case) -> SyncPlan:
    """One learner rank sends; some tensors are staged."""
    settings = {"bucket_bytes": 40_000, "staging": True, "staging_bytes": 200_000 // case.tp}
    section = {"model": str(model)}
    config = Config.model_validate(
        {"data": {"train": "x"}, "student": section, "teacher": section, "weight_sync": settings}
    )
    room = SyncSettings.of(config.weight_sync, "float32", case.format)
    servers = [ServerLayout(case.tp, case.ep)]
    return plan_sync(read_model_spec(model), config.learner.parallel, {}, servers, room)


ENDS = {"dense": ServerEnds((1, 500), (1, 511)), "moe": ServerEnds((1,), (1,))}


def test_a_server_holds_and_receives_quantised_matrices(
    server: ServerProcess, case: Case, models: Mapping[str, Path], tmp_path: Path
):
    model = models[case.model]
    assert ends_read_back(server, model) == ENDS[case.model]
    changed_model = perturbed_copy(model, tmp_path / "changed", scale=0.1, seed=5)
    held, new = (held_oracle(load_tensors(path), case.format) for path in (model, changed_model))
    references = [
        load_reference(dequantised_copy(path, tmp_path / f"as-held-{i}", tensors))
        for i, (path, tensors) in enumerate(((model, held), (changed_model, new)))
    ]
    plan, device = plan_of(model, case), torch.device("cpu")
    first, rest = (shards_of(plan, new, staged=staged) for staged in (True, False))
    requests = requests_of(tokens=24, count=3)

    async def run():
        async with Fleet([ServerClient(server.spec.url, timeout_s=120)]) as fleet:
            assert fleet.infos[0].quantization == case.format
            url = server.spec.url
            loaded = (await fleet.weight_digests())[url]
            before = await asyncio.gather(*map(fleet.generate, requests))
            group, name = await join(fleet)
            (sizes,) = await fleet.expect_weights(plan.shares([url]))
            await fleet.stage_weights(name)
            await asyncio.to_thread(send, group, first, device)
            staged = (await fleet.weight_digests(staged=True))[url]
            await fleet.pause("retract")
            await fleet.begin_weight_update()
            await asyncio.gather(
                fleet.receive_weights(name, 60), asyncio.to_thread(send, group, rest, device)
            )
            await fleet.flush_cache()
            await fleet.end_weight_update(1)
            await fleet.resume()
            received = (await fleet.weight_digests())[url]
            after = await asyncio.gather(*map(fleet.generate, requests))
            await fleet.destroy_weights_group(name)
            distributed.destroy_process_group(group)
        return loaded, sizes, staged, received, before, after

    loaded, sizes, staged, received, before, after = asyncio.run(run())
    layout = ServerLayout(case.tp, case.ep)
    require_as_planned(server.spec.url, read_model_spec(model), layout, loaded, case.format)
    assert differing(loaded, held) == [], "an ordinary checkpoint is quantised while it is loaded"
    assert 0 < len(staged) < len(loaded)
    assert differing(staged, new) == []
    assert differing(received, new) == []
    for reference, replies in zip(references, (before, after), strict=True):
        for request, reply in zip(requests, replies, strict=True):
            error = span_error(reference, request, reply, 0, len(reply.output_ids_T))
            bounded("quantised server: draws against de-quantised weights (nats)", error, TOLERANCE)
    for rank, size in enumerate(sizes):
        mine = [(p, new[p.hf_name]) for p in loaded if p.rank == rank]
        slices = [tensor.narrow(p.dim, p.start, p.length) for p, tensor in mine]
        assert size == sum(part.numel() * part.itemsize for part in slices)
        matrices = sum(part.numel() for part in slices if part.itemsize == 1)
        scales = sum(part.numel() for part in slices if part.shape[-1] == 1)
        assert 4 * scales < matrices / 8, "scales are few"
