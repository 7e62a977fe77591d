"""Every family in one world: logits, round trips, checkpoint directories."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from safetensors.torch import load_file, save_file

from megatron_opd.checkpoint import to_megatron
from megatron_opd.checkpoint.convert import load_weights, source_of
from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.megatron_names import CONTENT
from megatron_opd.checkpoint.megatron_reader import MegatronSource
from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from megatron_opd.learner.attention import Packing
from megatron_opd.learner.devices import cpu
from megatron_opd.learner.lm_head import head_slice, install_lean_head
from megatron_opd.learner.model import build_model
from megatron_opd.learner.world import World, init_world
from megatron_opd.losses.lean import lean_logp
from megatron_opd.models.gather import FullTensors
from megatron_opd.models.ranks import all_gather_json
from megatron_opd.models.spec import ModelSpec, read_model_spec
from tests.support.checkpoint_tensors import checkpoint_tensors

LENGTHS = (97, 13, 18)  # the first is longer than the Llama model's original context


def tokens(vocab_size: int) -> torch.Tensor:
    """[1, S] ids of the segments of LENGTHS, the same everywhere; the last id is among them."""
    ids = torch.randint(vocab_size, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(11))
    ids[0, 5] = vocab_size - 1
    return ids


def logits_alone(model: torch.nn.Module) -> torch.Tensor:
    """[S, V] of the segments of LENGTHS, each run alone through a model of transformers."""
    ids: Any = tokens(model.config.vocab_size)  # type: ignore[union-attr]
    with torch.no_grad():
        return torch.cat([model(part).logits[0] for part in ids.split(LENGTHS, 1)])


def full_logits(chunks: list[Any], spec: ModelSpec, world: World) -> torch.Tensor | None:
    """[S, padded V] on the ranks of the last stage."""
    found: list[torch.Tensor] = []
    interleaved = len(chunks) > 1
    count = world.parallel.pp if interleaved else 1  # an interleaved schedule wants that many

    def forward_step(_: Any, module: Any) -> tuple[torch.Tensor, Any]:
        packing = Packing.of(LENGTHS, world.device)
        out = module(tokens(spec.vocab_size), None, None, packed_seq_params=packing)

        def collect(logits_1Sv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            found.append(logits_1Sv[0].detach().clone())
            return logits_1Sv.sum() * 0, torch.tensor(1), {}

        return out, collect

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter([None] * count) for _ in chunks],
            model=chunks,
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
        )
    if not found:
        return None
    parts = [torch.empty_like(found[0]) for _ in range(world.parallel.tp)]
    dist.all_gather(parts, found[0].contiguous(), group=ps.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=1)


def check_families(out: Path, *, models: dict[str, Path], parallel: dict[str, int]) -> None:
    """Logits of every model against transformers' (in `logits.expected`), bitwise export."""
    config = LearnerConfig.model_validate({"dtype": "float32", "parallel": parallel})
    layout = config.parallel
    gaps: dict[str, float] = {}
    with cpu.install():
        world = init_world(layout, 1, 1, 60.0)
        for name, path in models.items():
            spec = read_model_spec(path)
            spec.check_parallel(layout)
            chunks = [wrapped.module for wrapped in build_model(spec, world, config)]
            load_weights(chunks, spec, world, source_of(path, spec, None))
            logits = full_logits(chunks, spec, world)
            if logits is not None:
                expected = load_file(path / "logits.expected")["logits"]
                real = logits[:, : spec.vocab_size]
                gaps[name] = float((real - expected).abs().max())
                assert gaps[name] <= 2e-5, (name, gaps[name])
                padding = logits[:, spec.vocab_size :]
                assert padding.shape[1] == spec.padded_vocab(layout.tp) - spec.vocab_size
                assert bool((padding == -torch.inf).all()), name
            _equal_to_source(FullTensors(chunks, spec, world), path)
            _loads_converted(chunks, spec, world, path)
    if world.last_stage and world.tp_rank == 0 and world.data_rank == 0:
        (out / "result.json").write_text(json.dumps(gaps))
    dist.destroy_process_group()


def check_cut(out: Path, *, model: Path, parallel: dict[str, int], num_ids: Sequence[int]) -> None:
    """Log-probs of cut vocabularies, by logits and by the head's input, against transformers'."""
    config = LearnerConfig.model_validate({"dtype": "float32", "parallel": parallel})
    with cpu.install():
        world = init_world(config.parallel, 1, 1, 60.0)
        gaps = {count: _cut_gaps(model, world, config, count) for count in num_ids}
    if world.rank == 0:
        (out / "result.json").write_text(json.dumps(gaps))
    dist.destroy_process_group()


def _cut_gaps(model: Path, world: World, config: LearnerConfig, num_ids: int) -> list[float]:
    spec = replace(read_model_spec(model), cut_to=num_ids)
    chunks = [wrapped.module for wrapped in build_model(spec, world, config)]
    load_weights(chunks, spec, world, source_of(model, spec, None))
    expected = load_file(model / "logits.expected")["logits"][:, :num_ids]
    expected = expected.double().log_softmax(-1)
    logits = full_logits(chunks, spec, world)
    assert logits is not None
    assert bool((logits[:, num_ids:] == -torch.inf).all())
    dense = logits.double().log_softmax(-1)[:, :num_ids]
    install_lean_head(chunks[-1])
    hidden = full_logits(chunks, spec, world)
    assert hidden is not None
    ids_S = torch.arange(len(hidden)) % num_ids
    rows_S = torch.arange(len(hidden))
    lean = lean_logp(hidden[:, : spec.hidden_size], head_slice(chunks[-1]), rows_S, ids_S)
    errors = dense - expected, lean.logp_N - expected[rows_S, ids_S]
    return [float(error.abs().max()) for error in errors]


def _equal_to_source(full: FullTensors, path: Path) -> None:
    exported = {name: tensor.clone() for name, tensor in full.tensors()}
    if full.world.rank != 0:
        assert not exported
        return
    expected = checkpoint_tensors(path)
    if full.spec.tied:
        expected.pop("lm_head.weight", None)
    assert exported.keys() == expected.keys(), exported.keys() ^ expected.keys()
    assert {n: shape for n, shape, _ in full.manifest()} == {
        name: tuple(t.shape) for name, t in expected.items()
    }
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name


def _loads_converted(chunks: list[Any], spec: ModelSpec, world: World, path: Path) -> None:
    """The checkpoint directories made of the same model, through Megatron and our own reader."""
    held = [
        [*chunk.named_parameters(), *((n, b) for n, b in chunk.named_buffers() if "bias" in n)]
        for chunk in chunks
    ]
    parameters = [(f"{i}.{n}", p) for i, found in enumerate(held) for n, p in found]
    expected = {name: parameter.detach().clone() for name, parameter in parameters}

    def forget() -> None:
        with torch.no_grad():
            for _, parameter in parameters:
                parameter.fill_(7.0)

    def require_loaded(how: str) -> None:
        for name, parameter in parameters:
            assert torch.equal(parameter, expected[name]), (how, path.name, name)

    for directory in sorted(path.glob("megatron*")):
        forget()
        metadata = ensure_metadata_has_dp_cp_group(dict(CONTENT))
        wanted = {str(i): c.sharded_state_dict(metadata=metadata) for i, c in enumerate(chunks)}
        state = dist_checkpointing.load(wanted, str(directory))
        for index, chunk in enumerate(chunks):
            chunk.load_state_dict(state[str(index)])
        require_loaded("dist_checkpointing")
        assert state["content_metadata"] == CONTENT
        forget()
        load_weights(chunks, spec, world, MegatronSource(directory, spec))
        require_loaded("MegatronSource")


def saved_by_megatron(out: Path, *, models: dict[str, Path], metadata: dict[str, Any]) -> None:
    """Checkpoints that Megatron itself writes, in either of its forms, to `out`/name."""
    # Megatron's writer starts processes of its own, which a daemon may not.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # The one that holds its queue of results would import everything anew, in seconds.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    config = LearnerConfig.model_validate({"dtype": "float32", "parallel": {"tp": 2}})
    with cpu.install():
        world = init_world(config.parallel, 1, 1, 60.0)
        for name, model in models.items():
            spec = read_model_spec(model)
            (built,) = build_model(spec, world, config)
            load_weights(built, spec, world, source_of(model, spec, None))
            described = ensure_metadata_has_dp_cp_group(dict(metadata))
            if world.rank == 0:
                (out / name).mkdir()
            dist.barrier()
            dist_checkpointing.save(
                built.module.sharded_state_dict(metadata=described),
                str(out / name),
                content_metadata=metadata,
            )
    dist.destroy_process_group()


def convert(out: Path, *, source: Path, unit_bytes: int, damaged: bool) -> None:
    """`opd convert hf-to-megatron` on every rank; `damaged`: the last one writes a unit wrong."""
    crew = Crew.join(os.environ)
    mine: list[int] = []
    real = to_megatron.write_unit

    def watched(path: Path, unit: int, *rest: Any) -> dict[str, Any]:
        mine.append(unit)
        record = real(path, unit, *rest)
        if damaged and crew.rank == crew.size - 1:
            next(iter(record["tensors"].values()))["digest"] = "0" * 16
        return record

    error = ""
    with mock.patch.object(to_megatron, "write_unit", watched):
        try:
            to_megatron.hf_to_megatron(
                source,
                out / "megatron",
                parallel=ParallelConfig(),
                dtype=None,
                crew=crew,
                unit_bytes=unit_bytes,
            )
        except ValueError as raised:
            error = str(raised)
    told = all_gather_json({"error": error, "units": len(mine)}, crew)
    if crew.rank == 0:
        errors, units = ([one[key] for one in told] for key in ("error", "units"))
        (out / "result.json").write_text(json.dumps({"errors": errors, "units": units}))
    crew.leave()


def write_expected(path: Path, logits_SV: torch.Tensor) -> None:
    """What transformers computes, for the ranks to read."""
    save_file({"logits": logits_SV.contiguous()}, path / "logits.expected")
