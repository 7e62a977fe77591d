"""Counts the bytes that a micro-batch's forward pass keeps for its backward pass.

The method is that of "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti
et al. 2022, sec. 4): add up what each operation saves. Its formula, s b h (34 + 5 a s / h) / t for
LayerNorm, GELU and unfused attention with 16-bit activations, becomes for the layers built here, S
tokens, t tensor-parallel ranks with sequence parallelism, activations of b bytes:

    norms           2 S h (b + b) / t                                  input and output of each
    attention       S d b ((H + 2 K) + (2 H + K) + H) / t              fused q k v; the normalised
                                                                       queries' input, rotated q and
                                                                       k; the output, which no
                                                                       softmax goes with (flash)
    dense SwiGLU    S b (2 f + f) / t                                  both halves; their product
    experts         S k b (h + 2 f_e + f_e) / t                        the permuted token, and the
                                                                       same of its expert
    router          S (5 E + 20 k) / t                                 float32 scores, mask, indices
    shared experts  S b (2 f_s + f_s + g h) / t                        as dense; what a gate weighs

    latents         2 S (r + q) (b + b) / t                            their norms, as above
    of them         S b H (4 d + e) / t                                rotated q and k, v and the
                                                                       output as wide as they; the
                                                                       output's e features

h hidden, d head, H heads, K key-value heads, f, f_e and f_s feed-forward features, E experts, k of
them a token, g 1 where a gate weighs the shared experts, else 0; of latent attention r and q
features of the latents, e of a value head. Without TransformerEngine norms save a float32 copy,
experts the activated half, a copy of the other and their output before the router's weight,
attention padded copies of q and k. Experts are taken to be evenly loaded. Measured against saved
tensors in tests/dist/test_planning.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_opd.config.learner import HeadLogp, ParallelConfig
from megatron_opd.models.delta_net import DeltaNet
from megatron_opd.models.latent import Latent
from megatron_opd.models.spec import ModelSpec

TransformerImpl = Literal["transformer_engine", "local"]
BYTES = {"float32": 4, "bfloat16": 2}

CHUNK = 64
"""Positions that the gated delta rule takes at once."""
# The lean LM head's two float32 block buffers (losses/blocks.py): of 2**25 logits on a GPU, of
# 2**21 on a CPU, which is where Megatron's local layers are used.
LEAN_BLOCK_BYTES: dict[TransformerImpl, int] = {
    "transformer_engine": 2 * 4 * 2**25,
    "local": 2 * 4 * 2**21,
}


@dataclass(frozen=True, slots=True)
class Shapes:
    """Holds what an activation's size depends on. tokens: of a micro-batch on one cp rank.

    element_bytes: bytes of one element of an activation.
    """

    spec: ModelSpec
    parallel: ParallelConfig
    tokens: int
    element_bytes: int
    kernels: TransformerImpl

    @property
    def local(self) -> bool:
        """Returns whether Megatron's local layers are used instead of TransformerEngine's."""
        return self.kernels == "local"


def layer_bytes(shapes: Shapes, layer: int) -> float:
    """Count what one layer of a micro-batch keeps on one rank, without recomputation."""
    family, features = shapes.spec.family, shapes.spec.hidden_size
    net = shapes.spec.delta_net if shapes.spec.has_delta_net(layer) else None
    mixer = _attention(shapes) if net is None else _delta_net(shapes, net)
    per_token = 2 * _norm(shapes, features) + mixer
    if family.pre_norm and family.post_norm:
        # two more, whose outputs are added to the residual stream and not kept
        per_token += 2 * (_norm(shapes, features) - features * shapes.element_bytes)
    around = per_token * shapes.tokens / shapes.parallel.tp
    return around + feed_forward_bytes(shapes, layer)


def feed_forward_bytes(shapes: Shapes, layer: int) -> float:
    """Count what the part of a layer after its second norm keeps, dense or of experts."""
    spec = shapes.spec
    moe = bool(spec.moe_layers) and spec.moe_layers[layer]
    return (_experts if moe else _dense)(shapes) * shapes.tokens / shapes.parallel.tp


def boundary_bytes(shapes: Shapes) -> float:
    """Count [S, h] between layers, which is all that full recomputation keeps of a layer."""
    return shapes.spec.hidden_size * shapes.element_bytes * shapes.tokens / shapes.parallel.tp


def head_bytes(shapes: Shapes, logp: HeadLogp) -> float:
    """Count what ends the last stage: final norm, head input, log-probs of one micro-batch.

    lean: the gradient of the input in float32 and two blocks of logits. dense: the logits, those of
    the response (here: of every token) and their float32 softmax, twice while it is made.
    """
    spec, tokens, size = shapes.spec, shapes.tokens, shapes.element_bytes
    kept = _norm(shapes, spec.hidden_size) * tokens / shapes.parallel.tp
    kept += tokens * spec.hidden_size * size
    if logp != "dense":
        rows = tokens * spec.hidden_size * (size + 4)
        return kept + rows + LEAN_BLOCK_BYTES[shapes.kernels]
    return kept + tokens * spec.vocab_size / shapes.parallel.tp * (2 * size + 8)


def _norm(shapes: Shapes, features: int) -> float:
    """Count a norm's input and output over `features`, with its reciprocal root mean square."""
    size = shapes.element_bytes
    if shapes.local:
        # what the weight multiplies is rounded before, or after where that is 1 + weight
        normed = 4 if shapes.spec.family.zero_centred_norms else size
        return features * (4 + normed + size) + 4
    return 2 * features * size + 4


def _attention(shapes: Shapes) -> float:
    """Count what a layer's attention keeps of a token, before the division by t."""
    spec, size = shapes.spec, shapes.element_bytes
    if spec.latent is not None:
        return _latent_attention(shapes, spec.latent)
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gates = queries if spec.family.output_gate else 0
    normalised = any("q_norm" in name for row in spec.family.layer for name in row.hf)
    fused = (queries + gates + 2 * keys) * size
    if (tp := shapes.parallel.tp) > spec.num_kv_heads:
        fused *= tp  # gathered: every rank holds the heads of all
        keys = tp * spec.head_dim  # and computes with one key-value head, which others have too
    rotated = (queries + keys) * size
    out = queries * size + 4 * spec.num_heads
    kept = fused + rotated + out
    if gates:  # contiguous, in float32, its sigmoid; the output before and after it
        kept += gates * (size + 4 + 4) + queries * (4 + size)
    if normalised:
        roots = 4 * (spec.num_heads + keys // spec.head_dim)
        kept += queries * size + roots  # queries are made contiguous before their norm
        if shapes.local:
            # float32 copies of 16-bit inputs, and the normalised heads before their weight
            copies = (queries + keys) * 4 if size < 4 else queries * size
            normed = 4 if spec.family.zero_centred_norms else size
            kept += copies - queries * size + (queries + keys) * normed
    if shapes.local:
        # padded to [segments, longest] for one call: q, k and v once more; the output is gathered
        kept += (queries + 2 * keys) * size + queries * size
        if spec.family.sinks:  # one feature more of each, and of the output
            kept += (2 * spec.num_heads + 2 * keys // spec.head_dim) * size
        # cosine and sine of the rotary angles, made by each layer for q and for k, on every rank
        kept += 4 * spec.head_dim * size * shapes.parallel.tp
    return kept


def _delta_net(shapes: Shapes, net: DeltaNet) -> float:
    """Count what a layer's gated delta net keeps of a token, before the division by t.

    Without fla's kernels the rule keeps the products of its chunks of 64 positions too.
    """
    size, by_head = shapes.element_bytes, net.values * net.key_dim
    projected = (sum(net.mixed) + net.value_features + 2 * net.values) * size
    mixed = 2 * sum(net.mixed) * size  # before the convolution, and after silu
    # queries and keys of every value head, decay and strength, what is read
    rule = 2 * by_head * size + 8 * net.values + net.value_features * size
    gated = net.values * _norm(shapes, net.value_dim) + 2 * net.value_features * (size + 4)
    kept = projected + mixed + rule + gated
    if shapes.local:
        kept += 4 * net.values * (2 * CHUNK * CHUNK + 8 * net.key_dim + 6 * net.value_dim)
    return kept


def _latent_attention(shapes: Shapes, latent: Latent) -> float:
    """Count what a layer's latent attention keeps of a token, before the division by t."""
    heads, size = shapes.spec.num_heads, shapes.element_bytes
    kept = _norm(shapes, latent.rank)
    if latent.query_rank is not None:
        kept += _norm(shapes, latent.query_rank)
    kept += heads * ((4 * latent.query + latent.value) * size + 4)
    if shapes.local:
        # q, k and v once more, before they are padded to [segments, longest] for one call
        kept += 3 * heads * latent.query * size
    # cosine and sine of the rotary angles, made by each layer for q and for k, on every rank
    return kept + 4 * latent.turning * size * shapes.parallel.tp


def _dense(shapes: Shapes) -> float:
    """Count what a dense feed-forward layer keeps of a token, before the division by t."""
    return 3 * shapes.spec.ffn_size * shapes.element_bytes


def _experts(shapes: Shapes) -> float:
    """Count what a layer of experts keeps of a token, before the division by t.

    The experts' own tensor parallelism gathers its tokens.
    """
    spec, size = shapes.spec, shapes.element_bytes
    chosen, width = spec.experts_per_token, shapes.parallel.expert_tp
    features = 3
    if shapes.local:
        # cut off, the gate, its sigmoid and their product are kept beside the halves
        features = 6 if spec.gate_limit is None else 8
    expert = features * spec.expert_ffn_size * size
    router = 5 * spec.num_experts + 20 * chosen
    permuted = (spec.hidden_size * size + 8) * width
    shared = 3 * spec.shared_ffn_size * size
    if spec.family.shared_gate:
        shared += (spec.hidden_size + 1) * size
    return router + chosen * (permuted + expert) + shared
