"""What ranks of the GPU examples hold on TransformerEngine's layers, against the plan of syncs.

A plan follows from config.json and the layout alone. Where a rank's parameters differ from it, by a
name, a first index or a length, a weight sync fails on a GPU machine, or writes wrong numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from checks.gpu.record import PartFailed
from harness.tree import ROOT
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.models.shards import local_shards
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.models.views import View, views_by_name
from megatron_opd.weight_sync.holdings import Held, learner_holdings

EXAMPLES = ROOT / "examples" / "cluster"
NAMES = ("one_node", "four_nodes", "sixteen_nodes")
ENGINE = "TE"
"""Begins the names of Megatron's classes whose kernels are TransformerEngine's."""


@dataclass(frozen=True, order=True)
class Slice:
    """What a rank holds of a tensor: `length` indices of dimension `dim`, from `start` on.

    dim: 0 where it holds all. others: the sizes of the tensor's other dimensions, which are whole.
    """

    dim: int
    start: int
    length: int
    others: tuple[int, ...]


def measure() -> dict[str, Any]:
    """Parameters by example and rank, and what differs. Raises PartFailed if anything does."""
    from checks.gpu_ready.meta import chunks_of, on_meta

    rows: list[dict[str, Any]] = []
    with on_meta():
        for name in NAMES:
            config = load_config(Config, EXAMPLES / name / "config.yaml")
            spec, learner = read_model_spec(ROOT / config.student.model), config.learner
            planned = list(learner_holdings(spec, learner.parallel, learner.megatron))
            for rank in ranks_of(learner.parallel.world_size, learner.parallel.pp):
                world, chunks = chunks_of(spec, learner, rank)
                views = views_by_name(local_shards(chunks, spec, world).values(), spec)
                wrong = differences(planned_slices(planned, rank), built_slices(views, spec))
                kinds = Counter(
                    type(module).__name__ for chunk in chunks for module in chunk.modules()
                )
                engine = {kind: n for kind, n in kinds.items() if kind.startswith(ENGINE)}
                if not engine:
                    wrong.append("no layer is TransformerEngine's")
                rows.append(
                    {
                        "example": name,
                        "rank": rank,
                        "of": learner.parallel.world_size,
                        "tensors": len(views),
                        "modules": engine,
                        "wrong": wrong,
                    }
                )
    bad = [
        f"{row['example']} rank {row['rank']}: {row['wrong'][0]}" for row in rows if row["wrong"]
    ]
    if bad:
        raise PartFailed(
            f"{len(bad)} of {len(rows)} ranks differ, the first: {bad[0]}", {"rows": rows}
        )
    return {"rows": rows}


def ranks_of(size: int, stages: int) -> list[int]:
    """The first and the last rank of the first, the middle and the last pipeline stage."""
    width = size // stages
    chosen = sorted({0, stages // 2, stages - 1})
    return sorted({at for stage in chosen for at in (stage * width, (stage + 1) * width - 1)})


def planned_slices(held: Iterable[Held], rank: int) -> dict[str, Slice]:
    """What the plan says that a rank holds, by tensor."""
    parts: dict[str, list[Held]] = {}
    for part in held:
        if rank in part.ranks:
            parts.setdefault(part.name, []).append(part)
    return {
        name: _slice(each[0].dim, [(part.start, part.length) for part in each], each[0].shape)
        for name, each in parts.items()
    }


def built_slices(views: Mapping[str, list[View]], spec: ModelSpec) -> dict[str, Slice]:
    """What a rank's parameters hold, by tensor; what is padding alone is left out."""
    from megatron_opd.models.tensors import expected_tensors

    shapes = expected_tensors(spec)
    found: dict[str, Slice] = {}
    for name, each in views.items():
        dim, whole = each[0].dim, shapes.get(name, ())
        shape = list(each[0].tensor.shape)
        shape[dim] = whole[dim] if len(whole) > dim else -1
        parts = [(view.start, view.length) for view in each if view.length]
        if parts:
            found[name] = _slice(dim, parts, shape)
    return found


def _slice(dim: int, parts: list[tuple[int, int]], shape: Iterable[int]) -> Slice:
    """One slice of adjoining parts (start, length) of a tensor of this shape."""
    sizes = list(shape)
    start, length = min(parts)[0], sum(length for _, length in parts)
    if (start, length) == (0, sizes[dim]):
        return Slice(0, 0, sizes[0], tuple(sizes[1:]))
    return Slice(dim, start, length, tuple(sizes[:dim] + sizes[dim + 1 :]))


def differences(planned: Mapping[str, Slice], built: Mapping[str, Slice]) -> list[str]:
    """A line for every tensor that a rank holds otherwise than the plan says."""
    lines = [f"{name} is planned and not built" for name in sorted(planned.keys() - built.keys())]
    lines += [f"{name} is built and not planned" for name in sorted(built.keys() - planned.keys())]
    return lines + [
        f"{name} is planned as {planned[name]} and built as {built[name]}"
        for name in sorted(planned.keys() & built.keys())
        if planned[name] != built[name]
    ]
