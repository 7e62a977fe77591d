"""Reads Hugging Face tensors out of a Megatron distributed checkpoint, one at a time.

Only the pieces that a tensor needs are read, so memory is bounded by the largest tensor.
"""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_opd.checkpoint.digest import entry_of
from megatron_opd.checkpoint.megatron_names import ParameterPlace, places, written_keys
from megatron_opd.checkpoint.restricted_metadata import METADATA, read_metadata
from megatron_opd.checkpoint.stated_heads import check_heads
from megatron_opd.models.families.keys import Key, row_of
from megatron_opd.models.file_kinds import around_megatron
from megatron_opd.models.shards import from_stored
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import hf_shapes, model_keys, row_shapes, stored_rows
from sglang_bridge.errors import some

DESCRIPTION = "metadata.json"
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


class MegatronSource:
    """Reads tensors of a Megatron distributed checkpoint directory of the model `spec`.

    Keys may carry a common prefix, as in a checkpoint that holds an optimizer beside the model.
    heads_stated: files of it that state the model's heads. ValueError: not such a directory, cut
    short, of another model, or with a `.metadata` that names what no checkpoint needs
    (restricted_metadata.py).
    """

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path, self.spec = path, spec
        metadata = _metadata_of(path)
        self.heads_stated = check_heads(path, spec)
        self._tensors = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._infos: dict[str, list[tuple[torch.Size, Any]]] = defaultdict(list)
        for index, info in (metadata.storage_data or {}).items():
            if index.offset is not None:
                self._infos[index.fqn].append((index.offset, info))
        found = [k for k in self._tensors if k.endswith(EMBEDDING) and "optimizer" not in k]
        if not found:
            raise ValueError(f"{path} lacks the tensor {EMBEDDING}")
        self._prefix = min(found, key=len).removesuffix(EMBEDDING)
        self._owner = {n: key for key in model_keys(spec) for n in hf_shapes(spec, key)}
        self._last: tuple[Key, dict[str, torch.Tensor]] | None = None

    @staticmethod
    def exists(path: Path) -> bool:
        """Return whether `path` is a Megatron distributed checkpoint."""
        return (path / DESCRIPTION).is_file() and (path / METADATA).is_file()

    def checked_keys(self) -> list[Key]:
        """Return every parameter of the model; together they read all that is stored of it.

        ValueError names what is missing or misshapen, and what no parameter reads.
        """
        keys = list(model_keys(self.spec))
        read: Counter[str] = Counter()
        for key in keys:
            padded = row_of(self.spec.family, key).vocab
            for part, name in enumerate(written_keys(self.spec, key)):
                place, (_, size, _) = self._place(key, part, name)
                read[place] += prod(self._tensors[place].size) if padded else prod(size)
        unread = [k for k in self.model_tensors if read[k] != prod(self._tensors[k].size)]
        head = self._prefix + HEAD
        if self.spec.tied and head in unread and self._holds_the_embedding(head):
            unread.remove(head)
        if unread:
            raise ValueError(
                f"{self.path} holds {some(map(self._said, unread))}, which a "
                f"{self.spec.family.name} model of the given config.json does not have: give the "
                "config.json of the model that was saved"
            )
        return keys

    @property
    def model_tensors(self) -> list[str]:
        """Lists the stored tensors that are a model's, whatever the prefix.

        Others are an optimizer's, and what modules keep for their own arithmetic, such as scales.
        """
        others = ("optimizer", "_extra_state")
        return [key for key in self._tensors if not any(part in key for part in others)]

    @property
    def padding_rows(self) -> int:
        """Counts the rows of the embedding that lie beyond the vocabulary and are not read."""
        return self._tensors[self._prefix + EMBEDDING].size[0] - self.spec.vocab_size

    def stored_pieces(self, key: str) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield a stored tensor as the pieces that it is kept in, with their offsets."""
        sizes = {chunk.offsets: chunk.sizes for chunk in self._tensors[key].chunks}
        for offset, info in self._infos[key]:
            yield tuple(offset), self._chunk(key, info, tuple(sizes[offset]))

    def _said(self, key: str) -> str:
        return f"{key.removeprefix(self._prefix)} {list(self._tensors[key].size)}"

    def _holds_the_embedding(self, head: str) -> bool:
        """Return whether a tied model's stored head is its embedding, as some programs save it."""
        row_bytes = [
            {offset: entry_of(piece) for offset, piece in self.stored_pieces(key)}
            for key in (head, self._prefix + EMBEDDING)
        ]
        return row_bytes[0] == row_bytes[1]

    def dtype_of(self, key: Key) -> torch.dtype:
        """Tell the type in which a parameter is stored."""
        place, _ = self._place(key, 0, written_keys(self.spec, key)[0])
        return self._tensors[place].properties.dtype

    def hf_tensors(self, key: Key) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors that a parameter holds, in memory of their own."""
        row, shapes = row_of(self.spec.family, key), hf_shapes(self.spec, key)
        parts = [
            self._region(*self._place(key, part, name))
            for part, name in enumerate(written_keys(self.spec, key))
        ]
        return dict(zip(shapes, from_stored(row, self.spec, parts), strict=True))

    def read(
        self, name: str, shape: tuple[int, ...], dim: int, start: int, length: int
    ) -> torch.Tensor:
        """Read a slice of a Hugging Face tensor, as shards.TensorSource promises."""
        key = self._owner.get(name)
        if key is None:
            raise ValueError(f"checkpoint {self.path} lacks the tensor {name}")
        # Queries, keys and values are asked for in turn and lie in one tensor.
        if self._last is None or self._last[0] != key:
            self._last = key, self.hf_tensors(key)
        tensor = self._last[1][name]
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{self.path}: tensor {name} must have shape {list(shape)}, "
                f"got {list(tensor.shape)}"
            )
        return tensor.narrow(dim, start, length)

    def _place(self, key: Key, part: int, name: str) -> tuple[str, _Box]:
        """Find the stored tensor and the box of it that holds part `part` of a parameter."""
        row, spec = row_of(self.spec.family, key), self.spec
        wanted = (stored_rows(spec, row)[part], *row_shapes(spec, row)[0][1:])
        for place in places(spec, key, part):
            stored = self._tensors.get(self._prefix + place.key)
            if stored is not None:
                got = tuple(stored.size)
                box = _box_of(place, wanted, got, padded=row.vocab)
                if box is None:
                    raise ValueError(
                        f"{self.path}: tensor {place.key} must have shape {list(wanted)} by "
                        f"config.json, got {list(got)}"
                    )
                return self._prefix + place.key, box
        raise ValueError(f"{self.path} lacks the tensor {name}")

    def _region(self, key: str, box: _Box) -> torch.Tensor:
        """Read a box of a stored tensor, without its leading dimensions of size 1."""
        start, size, kept = box
        out = torch.empty(size, dtype=self._tensors[key].properties.dtype)
        filled = 0
        sizes = {chunk.offsets: chunk.sizes for chunk in self._tensors[key].chunks}
        for offset, info in self._infos[key]:
            low = [max(a, b) for a, b in zip(start, offset, strict=True)]
            ends = zip(start, size, offset, sizes[offset], strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            chunk = self._chunk(key, info, tuple(sizes[offset]))
            if tuple(chunk.shape) == size:  # the usual case: no second copy of a large tensor
                return chunk.view(size[len(size) - kept :])
            target, source = out, chunk
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                target = target.narrow(dim, a - start[dim], b - a)
                source = source.narrow(dim, a - offset[dim], b - a)
            target.copy_(source)
            filled += target.numel()
        if filled != out.numel():
            raise ValueError(f"{self.path} lacks pieces of the tensor {key}")
        return out.view(out.shape[len(out.shape) - kept :])

    def _chunk(self, key: str, info: Any, size: tuple[int, ...]) -> torch.Tensor:
        file = self.path / info.relative_path
        try:
            length = min(info.length, file.stat().st_size)  # one beyond the file would be allocated
            with file.open("rb") as stream:
                stream.seek(info.offset)
                data = stream.read(length)
            chunk = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
            reason = (str(error).splitlines() or ["it ends too early"])[0]
            raise ValueError(f"{file}: cannot read a piece of {key}: {reason}") from None
        if not isinstance(chunk, torch.Tensor) or tuple(chunk.shape) != size:
            got = list(chunk.shape) if isinstance(chunk, torch.Tensor) else type(chunk).__name__
            raise ValueError(f"{file}: a piece of {key} must have shape {list(size)}, got {got}")
        return chunk


# Offsets, sizes, and how many trailing dimensions are the parameter's own.
_Box = tuple[tuple[int, ...], tuple[int, ...], int]


def _box_of(
    place: ParameterPlace, wanted: tuple[int, ...], stored: tuple[int, ...], *, padded: bool
) -> _Box | None:
    """Return the box of a stored tensor that `place` names; None: it has another shape."""
    lead, own = stored[: len(place.index)], stored[len(place.index) :]
    scale = 1 if place.half is None else 2
    rows_fit = bool(own) and (own[0] == wanted[0] * scale or (padded and own[0] > wanted[0]))
    inside = all(i < n for i, n in zip(place.index, lead, strict=False))
    if len(own) != len(wanted) or own[1:] != wanted[1:] or not rows_fit or not inside:
        return None
    start = (*place.index, (place.half or 0) * wanted[0], *(0 for _ in wanted[1:]))
    return start, (*(1 for _ in place.index), *wanted), len(wanted)


def _metadata_of(path: Path) -> Metadata:
    if not MegatronSource.exists(path):
        raise ValueError(
            around_megatron(path)
            or f"{path} is not a Megatron distributed checkpoint: it lacks {DESCRIPTION} or "
            f"{METADATA}"
        )
    return read_metadata(path)
