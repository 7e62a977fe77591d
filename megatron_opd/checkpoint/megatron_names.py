"""Knows where a parameter lies in a Megatron distributed checkpoint. Torch-free.

Keys are those of `sharded_state_dict` with TransformerEngine's layers, which Megatron-Core keeps
for its other layers too: a norm belongs to the linear layer after it, and an expert's index is
global. Two forms exist: a key for every layer and expert, with the gate and the up projection apart
(`singleton_local_shards`), and tensors stacked over layers and experts. Both are read, the first is
written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_opd.models.families.family import DELTA_NORM
from megatron_opd.models.families.keys import Key, row_of
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import sections

# What the loader must ask Megatron for: `sharded_state_dict(metadata=CONTENT)`. Megatron's own
# programs find it in the checkpoint.
CONTENT = {"singleton_local_shards": True}

_QKV_NORM = "self_attention.linear_qkv.layer_norm_weight"
_FC1_NORM = "mlp.linear_fc1.layer_norm_weight"
_MLP_NORM = "pre_mlp_layernorm.weight"
_LATENT_NORM = "_up_proj.layer_norm_weight"


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Locates a tensor of a checkpoint, or a part of one.

    index: along the leading dimensions (layers, experts) of a stacked one. half: of dimension 0
    after them, 0 or 1; None for all of it.
    """

    key: str
    index: tuple[int, ...] = ()
    half: int | None = None


def written_keys(spec: ModelSpec, key: Key) -> tuple[str, ...]:
    """Return the checkpoint keys of a parameter: each section of a stacked one has its own."""
    suffixes = [each.suffix for each in sections(spec, row_of(spec.family, key))] or [""]
    return tuple(_paths(spec, key)[0] + suffix for suffix in suffixes)


def state_keys(spec: ModelSpec, key: Key) -> tuple[str, ...]:
    """Return the keys of the module states that Megatron asks for beside a parameter.

    TransformerEngine keeps the scales of fp8 in them, other layers nothing; a checkpoint without
    them does not load.
    """
    path, _, kind = _paths(spec, key)[0].rpartition(".")
    modules = [path] if kind == "weight" else []
    if path.endswith(".linear_proj"):
        modules.append(path.replace(".linear_proj", ".core_attention"))
    return tuple(f"{module}._extra_state/shard_0_1" for module in modules)


def places(spec: ModelSpec, key: Key, part: int) -> Iterator[ParameterPlace]:
    """Yield where part `part` of `written_keys` may lie, by preference."""
    row = row_of(spec.family, key)
    fused = row.fusion == "gate_up"
    found = sections(spec, row)
    suffix = found[part].suffix if found else ""
    for path in _paths(spec, key):
        yield ParameterPlace(path + suffix)
        for stacked, index in _stacked(path if fused else path + suffix, key):
            yield ParameterPlace(stacked, index, part if fused else None)
        if fused:
            yield ParameterPlace(path, (), part)


def _paths(spec: ModelSpec, key: Key) -> tuple[str, ...]:
    """Return the parameter's spellings, every layer and expert apart; the first is written."""
    row = row_of(spec.family, key)
    if key.layer < 0:
        return (row.mcore[0],)
    inner: tuple[str, ...] = (row.mcore[0],)
    if _QKV_NORM in row.mcore:
        inner = (DELTA_NORM if spec.has_delta_net(key.layer) else _QKV_NORM,)
    elif _FC1_NORM in row.mcore:
        # With experts no linear layer follows the norm; Megatron's local layers still say so.
        inner = (_MLP_NORM, _FC1_NORM) if spec.moe_layers[key.layer] else (_FC1_NORM,)
    elif row.mcore[-1].endswith(_LATENT_NORM):
        inner = row.mcore[::-1]
    elif row.expert:
        inner = (row.mcore[0].replace("local_experts.{e}", f"experts.{key.expert}"),)
    return tuple(f"decoder.layers.{key.layer}.{name}" for name in inner)


def _stacked(path: str, key: Key) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield spellings without the expert's index, without the layer's, without both."""
    layer, expert = f".layers.{key.layer}.", f".experts.{key.expert}."
    if key.expert >= 0:
        yield path.replace(expert, ".experts."), (key.expert,)
    if key.layer >= 0:
        yield path.replace(layer, ".layers."), (key.layer,)
    if key.expert >= 0 and key.layer >= 0:
        both = path.replace(layer, ".layers.").replace(expert, ".experts.")
        yield both, (key.layer, key.expert)
