"""What a rank's parameters show as slices is the checkpoint's, in live memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_opd.models.families.keys import hf_names, row_of
from megatron_opd.models.shards import Shard, cut, fuse
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.models.tensors import model_keys, row_shapes
from megatron_opd.models.views import View, shard_views, views_by_name


class Checkpoint:
    """Random tensors by name; implements models.shards.TensorSource."""

    def __init__(self, spec: ModelSpec) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(shape, generator=generator)
            for key in model_keys(spec)
            for name, shape in zip(
                hf_names(spec.family, key), row_shapes(spec, row_of(spec.family, key)), strict=True
            )
        }

    def read(
        self, name: str, shape: tuple[int, ...], dim: int, start: int, length: int
    ) -> torch.Tensor:
        assert tuple(self.tensors[name].shape) == shape
        return self.tensors[name].narrow(dim, start, length)


def shards_of(spec: ModelSpec, held: Checkpoint, count: int) -> list[Shard]:
    """Every parameter as `count` ranks hold it."""
    found: list[Shard] = []
    for key in model_keys(spec):
        row, names = row_of(spec.family, key), hf_names(spec.family, key)
        shape = list(fuse(row, spec, [held.tensors[name] for name in names]).shape)
        pieces = 1 if row.dim is None else count
        if row.vocab:
            shape[0] = spec.padded_vocab(pieces)
        shape[row.dim or 0] //= pieces
        for index in range(pieces):
            empty = Shard(key, row, names, torch.nn.Parameter(torch.zeros(shape)), index, pieces)
            found.append(replace(empty, parameter=torch.nn.Parameter(cut(empty, spec, held))))
    return found


@pytest.mark.parametrize(
    ("count", "heads", "kv_heads"),
    [
        *((1, 8, 4), (2, 8, 4)),  # several KV groups on each of two ranks
        *((4, 8, 2), (8, 8, 2), (4, 4, 1)),  # a group on several, the last two cut within heads
    ],
)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_slices_are_the_checkpoint_s(
    kind: str, count: int, heads: int, kv_heads: int, request: pytest.FixtureRequest
):
    model: Path = request.getfixturevalue(kind)
    spec = read_model_spec(model)
    spec = replace(spec, vocab_size=301, num_heads=heads, num_kv_heads=kv_heads)
    held = Checkpoint(spec)
    shards = shards_of(spec, held, count)
    covered = {name: torch.zeros(tensor.shape) for name, tensor in held.tensors.items()}
    for shard in shards:
        if shard.row.fusion == "qkv":
            whole = fuse(shard.row, spec, [held.tensors[name] for name in shard.names])
            assert torch.equal(shard.parameter, whole.chunk(count)[shard.index])
        memory = shard.parameter.untyped_storage().data_ptr()
        elements = 0
        for view in shard_views(shard, spec):
            part = held.tensors[view.name].narrow(view.dim, view.start, view.length)
            assert torch.equal(view.tensor, part), (view.name, shard.index)
            assert view.tensor.untyped_storage().data_ptr() == memory, "no copy"
            covered[view.name].narrow(view.dim, view.start, view.length).add_(1)
            elements += view.tensor.numel()
        padding = 0 if not shard.row.vocab else spec.padded_vocab(shard.count) - spec.vocab_size
        last = shard.index == shard.count - 1
        assert elements == shard.parameter.numel() - padding * last * spec.hidden_size
    assert all(bool((times == 1).all()) for times in covered.values())
    for views in views_by_name(shards, spec).values():
        starts = [view.start for view in views]
        assert starts == sorted(starts), "in order"


def test_a_rank_of_padding_alone_shows_nothing(dense: Path):
    """130 ids padded to four ranks' 4 x 40 would be: the last holds no row of the vocabulary."""
    spec = replace(read_model_spec(dense), vocab_size=100)
    (key, *_) = (key for key in model_keys(spec) if row_of(spec.family, key).vocab)
    row, names = row_of(spec.family, key), hf_names(spec.family, key)
    shard = Shard(key, row, names, torch.nn.Parameter(torch.zeros(40, 64)), 3, 4)
    (view,) = shard_views(shard, spec)
    assert view.length == 0
    assert view.cut(0, 100) is None


def test_a_cut_is_what_both_hold():
    view = View("w", 1, 10, torch.arange(12.0).view(2, 6))
    for start, length in ((0, 10), (16, 4), (12, 0)):
        assert view.cut(start, length) is None, (start, length)
    whole, middle, end = view.cut(0, 100), view.cut(12, 2), view.cut(15, 9)
    assert whole is not None
    assert (whole.start, whole.length) == (10, 6)
    assert middle is not None
    assert (middle.start, middle.tensor.tolist()) == (12, [[2, 3], [8, 9]])
    assert end is not None
    assert (end.start, end.tensor.tolist()) == (15, [[5], [11]])
