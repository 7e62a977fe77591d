"""Lists every tensor that a model has, by its config.json: keys, Hugging Face names and shapes.

Only this module knows a shape: checks of checkpoints, conversions, plans of memory and counts of
FLOPs all ask here. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_opd.models.families.family import SHARED_GATE, Row
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
    for index, row in enumerate(spec.family.layer):
        if row.layers in ("all", kind):
            yield index, row


def hf_shapes(spec: ModelSpec, key: Key) -> dict[str, Shape]:
    """Return the Hugging Face tensors of a key, in fusion order, with their shapes."""
    row = row_of(spec.family, key)
    return dict(zip(hf_names(spec.family, key), row_shapes(spec, row), strict=True))


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Return every tensor that a Hugging Face checkpoint of the model holds."""
    return {n: shape for key in model_keys(spec) for n, shape in hf_shapes(spec, key).items()}


def qkv_parts(spec: ModelSpec, index: int, count: int) -> tuple[tuple[int, int, int], ...]:
    """List what piece `index` of `count` holds of q, k and v: (place of the tensor, start, length).

    In the order of its rows, which are [q.., k, v] of each KV group in turn. With more pieces than
    KV groups a group lies on several of them, and Megatron gathers its activations
    (SelfAttention.get_query_key_value_tensors). What a piece holds of one tensor is one range.
    """
    size, ratio = spec.head_dim, spec.num_heads // spec.num_kv_heads
    group_rows = (ratio + 2) * size
    rows = spec.num_kv_heads * group_rows // count
    at, end = index * rows, (index + 1) * rows
    found: list[tuple[int, int, int]] = []
    while at < end:
        group, inside = divmod(at, group_rows)
        place = 0 if inside < ratio * size else 1 if inside < (ratio + 1) * size else 2
        first = (0, ratio * size, (ratio + 1) * size)[place]  # of the tensor's, in the group
        height = size if place else ratio * size
        length = min(end - at, first + height - inside)
        found.append((place, group * height + inside - first, length))
        at += length
    return tuple(found)


def row_shapes(spec: ModelSpec, row: Row) -> tuple[Shape, ...]:
    """List the shapes of a row's Hugging Face tensors, in fusion order; one expert's if several."""
    hidden, heads = spec.hidden_size, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    if row.fusion == "qkv":
        tail = () if row.mcore[0].endswith(".bias") else (hidden,)
        return tuple((count * spec.head_dim, *tail) for count in heads)
    features = spec.expert_ffn_size if row.expert else spec.ffn_size
    if row.mcore[0].startswith("mlp.shared_experts."):
        features = spec.shared_ffn_size
    if row.fusion == "gate_up":
        return ((features, hidden),) * 2
    if row.vocab:
        return ((spec.vocab_size, hidden),)
    together = heads if spec.family.norms_all_heads else (1, 1, 1)
    others: dict[str, Shape] = {
        "self_attention.linear_proj.weight": (hidden, spec.num_heads * spec.head_dim),
        "self_attention.q_layernorm.weight": (together[0] * spec.head_dim,),
        "self_attention.k_layernorm.weight": (together[1] * spec.head_dim,),
        "mlp.router.weight": (spec.num_experts, hidden),
        SHARED_GATE: (1, hidden),
    }
    if row.mcore[0] in others:
        return (others[row.mcore[0]],)
    return ((hidden, features) if row.dim == 1 else (hidden,),)
