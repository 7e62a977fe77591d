"""Takes tensors out of those that files hold fused, and puts them back, bitwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from megatron_opd.models.places import Place


def part_of(whole: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the tensor that a file's tensor holds at `place`: live memory of `whole`."""
    one = whole if place.index is None else whole[place.index]
    rows = one.t() if place.transposed else one
    end = place.start + place.step * (place.part[0] - 1) + 1
    return rows[place.start : end : place.step]


def packed(
    tensors: Iterable[tuple[str, torch.Tensor]], where: Mapping[str, Place]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a file's tensors, each as soon as it is whole, made of the model's.

    where: places of all of them; a tensor without a place stays as it is. ValueError: parts of one
    differ in type, or some never came.
    """
    left: dict[str, int] = {}
    for place in where.values():
        left[place.name] = left.get(place.name, 0) + 1
    begun: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        place = where.get(name)
        if place is None or place.is_whole:
            yield (name if place is None else place.name), tensor
            continue
        whole = begun.get(place.name)
        if whole is None:
            whole = begun[place.name] = tensor.new_empty(place.shape)
        if whole.dtype != tensor.dtype:
            raise ValueError(
                f"tensors that a file holds in {place.name} must share a dtype, got {name} "
                f"{tensor.dtype} besides {whole.dtype}"
            )
        part_of(whole, place).copy_(tensor)
        left[place.name] -= 1
        if left[place.name] == 0:
            yield place.name, begun.pop(place.name)
    if begun:
        raise ValueError(f"parts of {', '.join(begun)} are missing")
