"""Lists every tensor that a model has, by its config.json: keys, Hugging Face names and shapes.

Only this module knows a shape: checks of checkpoints, conversions, plans of memory and counts of
FLOPs all ask here. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from megatron_opd.models.families.family import EXPERT_BIAS, ROUTER_BIAS, SHARED_GATE, SINKS, Row
from megatron_opd.models.families.keys import Key, hf_names, row_of
from megatron_opd.models.spec import ModelSpec

Shape = tuple[int, ...]


def model_keys(spec: ModelSpec) -> Iterator[Key]:
    """Yield every parameter once: the embedding, the layers in order, what follows them.

    A tied LM head is the embedding, and no key of its own.
    """
    top = {row.mcore[0]: Key(-1, index) for index, row in enumerate(spec.family.top)}
    yield top.pop("embedding.word_embeddings.weight")
    for layer in range(spec.num_layers):
        for index, row in layer_rows(spec, layer):
            for expert in range(spec.num_experts) if row.expert else (-1,):
                yield Key(layer, index, expert)
    if spec.tied:
        del top["output_layer.weight"]
    yield from top.values()


def layer_rows(spec: ModelSpec, layer: int) -> Iterator[tuple[int, Row]]:
    """Yield the rows of the family's table that `layer` holds, with their places in it."""
    kind = "moe" if spec.moe_layers[layer] else "dense"
    attention = "delta" if spec.has_delta_net(layer) else "full"
    for index, row in enumerate(spec.family.layer):
        if row.layers in ("all", kind) and row.attention in ("all", attention):
            yield index, row


def hf_shapes(spec: ModelSpec, key: Key) -> dict[str, Shape]:
    """Return the Hugging Face tensors of a key, in fusion order, with their shapes."""
    row = row_of(spec.family, key)
    return dict(zip(hf_names(spec.family, key), row_shapes(spec, row), strict=True))


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Return every tensor that a Hugging Face checkpoint of the model holds."""
    return {n: shape for key in model_keys(spec) for n, shape in hf_shapes(spec, key).items()}


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Describes rows [start, start + length) of a row's Hugging Face tensor number `place`.

    Of a stacked parameter every rank holds its share of each section, one after another. suffix: of
    the name of the checkpoint's tensor that holds the section, all ranks' together.
    """

    suffix: str
    place: int
    start: int
    length: int


def sections(spec: ModelSpec, row: Row) -> tuple[StackedRows, ...]:
    """List the sections of a stacked row; none: it is no stacked one."""
    if row.fusion == "gate_up":
        rows = row_shapes(spec, row)[0][0]
        return StackedRows("_w", 0, 0, rows), StackedRows("_v", 1, 0, rows)
    if row.fusion != "delta":
        return ()
    net = spec.delta_net
    assert net is not None
    mixed = [
        StackedRows(f".{name}", 0, start, length)
        for name, start, length in zip(
            ("query", "key", "value"), accumulate(net.mixed, initial=0), net.mixed, strict=False
        )
    ]
    others = (("z", net.value_features), ("beta", net.values), ("alpha", net.values))
    rest = [StackedRows(f".{name}", 1 + i, 0, length) for i, (name, length) in enumerate(others)]
    return (*mixed, *rest[: len(row.hf) - 1])


def stored_rows(spec: ModelSpec, row: Row) -> list[int]:
    """Return the rows of each tensor of a Megatron checkpoint: of each section, or of all."""
    whole = sum(shape[0] for shape in row_shapes(spec, row))
    return [each.length for each in sections(spec, row)] or [whole]


def fused_parts(
    spec: ModelSpec, row: Row, index: int, count: int
) -> tuple[tuple[int, int, int], ...]:
    """List what piece `index` of `count` of a fused row holds, in the order of its rows.

    As (place of the tensor, start, length).
    """
    if row.fusion == "qkv":
        return tuple(_qkv_parts(spec, index, count))
    return tuple(
        (each.place, each.start + index * (each.length // count), each.length // count)
        for each in sections(spec, row)
    )


def _qkv_parts(spec: ModelSpec, index: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of rows that are [q.., k, v] of each KV group in turn.

    With an output gate they are [q.., gate.., k, v], and the query tensor's [q, gate] of each head.
    With more pieces than KV groups a group lies on several of them, and Megatron gathers its
    activations (SelfAttention.get_query_key_value_tensors).
    """
    size, ratio = spec.head_dim, spec.num_heads // spec.num_kv_heads
    gated = spec.family.output_gate
    heads = _heads_of_group(ratio, gated)
    rows = spec.num_kv_heads * len(heads) * size // count
    at, end = index * rows, (index + 1) * rows
    pending: tuple[int, int, int] | None = None
    while at < end:
        slot, inside = divmod(at, size)
        group, slot = divmod(slot, len(heads))
        place, number = heads[slot]
        in_group = 1 if place else ratio * (2 if gated else 1)
        start = (group * in_group + number) * size + inside
        length = min(end - at, size - inside)
        if pending is not None and (pending[0], sum(pending[1:])) == (place, start):
            pending = (place, pending[1], pending[2] + length)
        else:
            if pending is not None:
                yield pending
            pending = (place, start, length)
        at += length
    if pending is not None:
        yield pending


def _heads_of_group(ratio: int, gated: bool) -> list[tuple[int, int]]:
    """List (place of the tensor, which of its heads in a KV group) in the order of fused rows."""
    if not gated:
        return [*((0, head) for head in range(ratio)), (1, 0), (2, 0)]
    queries = [(0, 2 * head) for head in range(ratio)]
    return [*queries, *((0, 2 * head + 1) for head in range(ratio)), (1, 0), (2, 0)]


def row_shapes(spec: ModelSpec, row: Row) -> tuple[Shape, ...]:
    """List the shapes of a row's Hugging Face tensors, in fusion order; one expert's if several."""
    hidden, heads = spec.hidden_size, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    if row.fusion == "qkv":
        tail = () if row.mcore[0].endswith(".bias") else (hidden,)
        made = (heads[0] * (2 if spec.family.output_gate else 1), *heads[1:])
        return tuple((count * spec.head_dim, *tail) for count in made)
    if row.attention == "delta":
        assert spec.delta_net is not None
        return spec.delta_net.shapes(hidden)[row.mcore[0]]
    features = spec.expert_ffn_size if row.expert else spec.ffn_size
    if row.mcore[0].startswith("mlp.shared_experts."):
        features = spec.shared_ffn_size
    if row.fusion == "gate_up":
        tail = () if row.hf[0].endswith(".bias") else (hidden,)
        return ((features, *tail),) * 2
    if row.vocab:
        return ((spec.vocab_size, hidden),)
    together = heads if spec.family.norms_all_heads else (1, 1, 1)
    latent = {} if spec.latent is None else spec.latent.shapes(hidden, spec.num_heads)
    others: dict[str, Shape] = {
        "self_attention.linear_proj.weight": (hidden, spec.num_heads * spec.head_dim),
        "self_attention.q_layernorm.weight": (together[0] * spec.head_dim,),
        "self_attention.k_layernorm.weight": (together[1] * spec.head_dim,),
        "mlp.router.weight": (spec.num_experts, hidden),
        SHARED_GATE: (1, hidden),
        EXPERT_BIAS: (spec.num_experts,),
        ROUTER_BIAS: (spec.num_experts,),
        SINKS: (spec.num_heads,),
        **latent,
    }
    if row.mcore[0] in others:
        return (others[row.mcore[0]],)
    return ((hidden, features) if row.dim == 1 else (hidden,),)
