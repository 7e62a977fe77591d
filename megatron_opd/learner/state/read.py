"""Reads the shards of a Megatron distributed checkpoint: tensors and nothing else.

Invariant: nothing of the directory is unpickled without restriction. `.metadata` goes through
checkpoint/restricted_metadata.py, tensors through torch's weights-only loader; `common.pt` and
pickled objects (the `_extra_state` of modules) are left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,  # pyright: ignore[reportPrivateUsage]
    _replace_state_dict_keys_with_sharded_keys,  # pyright: ignore[reportPrivateUsage]
    _restore_dict_types,  # pyright: ignore[reportPrivateUsage]
    _unwrap_pyt_sharded_tensor,  # pyright: ignore[reportPrivateUsage]
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from megatron_opd.checkpoint.restricted_metadata import read_metadata, tensors_only


def read_shards(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read the sharded tensors `wanted`; collective.

    Data of sharded tensors is overwritten in place. What is stored and what all ranks want must be
    the same. ValueError: `.metadata` is refused; Megatron's and torch's own errors otherwise.
    """
    # dist_checkpointing.load without its common state, which 0.19 reads unrestricted and always.
    reader = _ShardReader(path)
    shards, found, factories = load_preprocess(wanted)
    shards, _ = extract_sharded_base(shards)
    stored = {
        key: entry
        for key, entry in reader.load_sharded_metadata(path).items()
        if entry.key != "common_state"
    }
    local, everywhere = determine_global_metadata(shards)
    shards, _, _ = validate_integrity_and_strict_load(
        shards, StrictHandling.RAISE_ALL, True, local, everywhere, stored
    )
    merge(found, reader.load(shards, path))
    loaded: Any = apply_factory_merges(found, factories)  # type: ignore[arg-type]
    return loaded


class _Files(FileSystemReader):
    """Reads the files of a checkpoint whose metadata was read already."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _ShardReader(TorchDistLoadShardedStrategy):
    """Implements Megatron's load strategy for one directory. ValueError: see read_metadata."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._metadata = tensors_only(read_metadata(path))

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        return self.load_tensors_metadata(checkpoint_dir, self._metadata)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Load; Megatron calls it with sharded tensors alone."""
        tensors: list[ShardedTensor] = list(nested_values(sharded_state_dict))
        flat, paths, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        targets: dict[str, Any] = mcore_to_pyt_state_dict(flat, True)
        load_shards(
            targets,
            storage_reader=_Files(Path(checkpoint_dir), self._metadata),
            planner=MCoreLoadPlanner(
                shapes_validation_sharded_tensors=[
                    tensor for tensor in tensors if not tensor.allow_shape_mismatch
                ],
                allow_shape_mismatch_sharded_tensors={
                    tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch
                },
            ),
        )
        read: dict[str, Any] = {
            key: _unwrap_pyt_sharded_tensor(target) for key, target in targets.items()
        }
        loaded = _replace_sharded_keys_with_state_dict_keys(read, paths, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded
