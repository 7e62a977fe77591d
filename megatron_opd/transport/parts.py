"""Cuts a share into what the ranks of each pipeline stage read of it. Torch-free.

Invariant: a part is a share in the same form, with as many frames, of which those that are not for
its stage are empty. Tokens and what groups decide go everywhere: every stage packs its positions by
them, and they take some 3 bytes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from megatron_opd.transport.samples import (
    FRAMES,
    Buffer,
    Frames,
    encode_inputs,
    raw,
    read_experts,
    read_gates,
    read_inputs,
)


@dataclass(frozen=True, slots=True)
class Needs:
    """Says what the ranks of a pipeline stage read of a sequence.

    cache: its draw cache. layers: rising, of the model's `of_layers` layers with experts those
    whose routed experts they replay. gates: the weights of these experts too.
    """

    cache: bool = True
    layers: tuple[int, ...] = ()
    of_layers: int = 0
    gates: bool = False


def part_of(frames: Sequence[Buffer], needs: Needs) -> list[Buffer]:
    """Return the frames of a stage's part; those that are sent whole are the share's own.

    ValueError: routed experts are no such array, or those of another model.
    """
    part = list(frames)
    for number, at in enumerate(range(1, len(frames) - FRAMES + 1, FRAMES)):
        part[at : at + FRAMES] = _sequence(number, frames[at : at + FRAMES], needs)
    return part


def _sequence(uid: int, frames: Frames, needs: Needs) -> list[Buffer]:
    inputs, cache, experts, gates = frames
    if not needs.cache:
        cache = b""
    if not len(experts) and not len(gates):
        return [inputs, cache, experts, gates]
    found = read_inputs(uid, inputs)
    experts_XLk = read_experts(uid, found.experts, experts)
    gates_XLk = read_gates(uid, experts_XLk, gates)
    if experts_XLk is None or not needs.layers:
        return [encode_inputs(replace(found, experts=None)), cache, b"", b""]
    layers = list(needs.layers)
    if experts_XLk.shape[1] != needs.of_layers:
        raise ValueError(
            f"sample {uid}: routed experts must be of {needs.of_layers} layers, "
            f"got {experts_XLk.shape[1]}"
        )
    if not needs.gates:
        gates_XLk, gates = None, b""
    if len(layers) < needs.of_layers:
        experts_XLk = experts_XLk[:, layers]
        experts = raw(experts_XLk)
        gates = b"" if gates_XLk is None else raw(gates_XLk[:, layers])
        kind = (len(layers), experts_XLk.shape[2], experts_XLk.itemsize)
        inputs = encode_inputs(replace(found, experts=kind))
    return [inputs, cache, experts, gates]
