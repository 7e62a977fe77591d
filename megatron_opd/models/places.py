"""Says where files hold a model's tensors: each by itself, or several fused in one. Torch-free.

Rows, plans and digests know each tensor by a name of its own (models/families). A family's files
may hold several in one (Family.packed), and so does transformers 5 in memory with experts. Only
this module knows which part of which tensor of a file is meant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron_opd.models.families.family import BLOCK, Family, Packed, stack_name
from megatron_opd.models.families.keys import Key, hf_names, layer_prefix, row_of
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import Shape, layer_rows, model_keys, row_shapes
from sglang_bridge.language_models import PREFIX, PUBLISHED_PREFIX


@dataclass(frozen=True, slots=True)
class Place:
    """Says where a file holds a tensor of the shape `part`.

    name, shape: of the file's tensor. index: along its leading dimension of experts; None: it has
    none. transposed: it lies as [in, out]. start, step: its row i is row start + step * i there,
    along the second dimension if transposed.
    """

    name: str
    shape: Shape
    part: Shape
    index: int | None = None
    transposed: bool = False
    start: int = 0
    step: int = 1

    @property
    def is_whole(self) -> bool:
        """Returns whether it is the file's tensor itself."""
        return self.shape == self.part and not self.transposed


def places(spec: ModelSpec, names: Collection[str] = ()) -> dict[str, Place]:
    """Return where a checkpoint holds each tensor of the model, in the order of tensors.model_keys.

    names: its tensors, which decide where a file may hold it otherwise than published; what none of
    them is, is placed as published.
    """
    packings = {layer: _packings(spec, layer) for layer in range(spec.num_layers)}
    found: dict[str, Place] = {}
    for key in model_keys(spec):
        row = row_of(spec.family, key)
        shapes = zip(row.hf, hf_names(spec.family, key), row_shapes(spec, row), strict=True)
        for template, name, shape in shapes:
            packed = packings.get(key.layer, {}).get(template, ())
            own = Place(_in_files(spec, name), shape, shape)
            start = _in_files(spec, layer_prefix(key.layer))
            ways = [_placed(each, key, template, shape, start) for each in packed]
            ways.insert(1 if packed and packed[0].packed in spec.family.packed else 0, own)
            found[name] = next((way for way in ways if way.name in names), ways[0])
    return found


def file_groups(spec: ModelSpec, keys: Iterable[Key]) -> list[tuple[Key, ...]]:
    """Group parameters so that no tensor of published files is of two groups, in their order."""
    where, groups = places(spec), list[list[Key]]()
    group_of: dict[str, list[Key]] = {}
    for key in keys:
        names = [where[name].name for name in hf_names(spec.family, key)]
        group = next((group_of[name] for name in names if name in group_of), None)
        if group is None:
            groups.append(group := [])
        group.append(key)
        group_of |= dict.fromkeys(names, group)
    return [tuple(group) for group in groups]


@dataclass(frozen=True, slots=True)
class _Packing:
    """Describes a packed tensor of a layer whose parts have these shapes."""

    packed: Packed
    shapes: Mapping[str, Shape]
    experts: int

    @property
    def shape(self) -> Shape:
        """Returns the shape of the file's tensor."""
        shapes = [self.shapes[part] for part in self.packed.parts]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        whole = whole[::-1] if self.packed.transposed else whole
        return (self.experts, *whole) if self.packed.experts else whole


def _packings(spec: ModelSpec, layer: int) -> dict[str, tuple[_Packing, ...]]:
    """Return what may hold each tensor of a layer besides itself, published forms first."""
    shapes: dict[str, Shape] = {}
    for _, row in layer_rows(spec, layer):
        shapes |= zip(row.hf, row_shapes(spec, row), strict=True)
    found: dict[str, tuple[_Packing, ...]] = {}
    for packed in (*spec.family.packed, *_in_memory(spec.family)):
        if all(part in shapes for part in packed.parts):
            packing = _Packing(packed, shapes, spec.num_experts)
            for part in packed.parts:
                found[part] = (*found.get(part, ()), packing)
    return found


def _in_memory(family: Family) -> Iterator[Packed]:
    """Yield how transformers 5 holds a layer with experts in memory, and writes it when told to."""
    published = {part for packed in family.packed for part in packed.parts}
    for row in family.layer:
        if row.expert and not published.intersection(row.hf):
            yield Packed(stack_name(row), row.hf, experts=True)
        elif row.hf[0].startswith(f"{BLOCK}."):
            yield Packed(f"mlp{row.hf[0].removeprefix(BLOCK)}", row.hf)


def _in_files(spec: ModelSpec, name: str) -> str:
    """Return what files call a tensor of the model, or what its name begins with."""
    if spec.published and name.startswith(PREFIX):
        return PUBLISHED_PREFIX + name.removeprefix(PREFIX)
    return name


def _placed(packing: _Packing, key: Key, template: str, shape: Shape, start: str) -> Place:
    """Return where the packed tensor holds the part `template` of a parameter.

    start: of the names of the layer's tensors in files.
    """
    packed = packing.packed
    at = packed.parts.index(template)
    above = sum(packing.shapes[part][0] for part in packed.parts[:at])
    return Place(
        start + packed.name,
        packing.shape,
        shape,
        key.expert if packed.experts else None,
        packed.transposed and len(shape) > 1,
        at if packed.interleaved else above,
        len(packed.parts) if packed.interleaved else 1,
    )
