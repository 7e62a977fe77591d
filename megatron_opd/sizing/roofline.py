"""Counts what a GPU computes, reads and sends in each phase of a run, and how long that takes.

A phase takes as long as the longer of its arithmetic and its memory traffic, which overlap inside
kernels, and then its exchanges, none of which is taken to be hidden (Williams et al. 2009, with
links besides):

    seconds = max(FLOPs / peak, bytes / bandwidth) + sum of links (sent / bandwidth + calls) + fixed

each rate the data sheet's times an assumed share (gpus.py). All counts are those of one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.servers import ServerConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sizing.activations import BYTES
from megatron_opd.sizing.exchanges import (
    Exchange,
    pass_exchanges,
    replica_shapes,
    step_exchanges,
)
from megatron_opd.sizing.flops import Work, forward_flops
from megatron_opd.sizing.gpus import GB, Efficiencies, Hardware
from megatron_opd.sizing.layout import expert_data_parallel
from megatron_opd.sizing.parameters import average_parameters
from megatron_opd.sizing.recompute import kept_bytes, recomputed_flops
from megatron_opd.sizing.served import Sized, size_of
from megatron_opd.sizing.servers import server_memory
from megatron_opd.sizing.settings import Settings

UPDATE_BYTES = 30
"""Bytes that AdamW reads and writes for a parameter: gradient, main weight, moments, weight."""


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """Counts what one GPU does. hbm_bytes: read and written. exchanges: those it takes part in."""

    flops: float
    hbm_bytes: float
    exchanges: tuple[Exchange, ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Holds the seconds of a phase by what they are spent on. fixed_s: launches, handshakes."""

    compute_s: float
    memory_s: float
    node_s: float = 0.0
    network_s: float = 0.0
    fixed_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns what the phase takes."""
        kernels_s = max(self.compute_s, self.memory_s)
        return kernels_s + self.node_s + self.network_s + self.fixed_s

    @property
    def terms(self) -> dict[str, float]:
        """Returns the seconds by the word for what they are spent on."""
        return {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "NVLink": self.node_s,
            "network": self.network_s,
            "overhead": self.fixed_s,
        }

    @property
    def ruled_by(self) -> str:
        """Returns the longest of them."""
        return max(self.terms, key=self.terms.__getitem__)

    def times(self, number: float) -> PhaseTime:
        """Return the time of so many phases."""
        return PhaseTime(*(number * seconds for seconds in self.terms.values()))


def phase_time(
    work: PhaseWork, hardware: Hardware, mfu: float, assumed: Efficiencies, fixed_s: float = 0.0
) -> PhaseTime:
    """Return the seconds of a phase whose arithmetic reaches `mfu` of the peak."""
    node_s, network_s = exchange_seconds(work.exchanges, hardware, assumed)
    return PhaseTime(
        compute_s=work.flops / (hardware.tflops * 1e12 * mfu),
        memory_s=work.hbm_bytes / (hardware.hbm_gbs * GB * assumed.hbm),
        node_s=node_s,
        network_s=network_s,
        fixed_s=fixed_s,
    )


def exchange_seconds(
    exchanges: Iterable[Exchange], hardware: Hardware, assumed: Efficiencies
) -> tuple[float, float]:
    """Return the seconds on links within a node, and on the network.

    A group that lies in several nodes sends all its bytes over the network.
    """
    node_s = network_s = 0.0
    for each in exchanges:
        if each.is_local:
            node_s += each.sent / (hardware.node_gbs * GB * assumed.link)
            node_s += each.calls * assumed.node_call_s
        else:
            network_s += each.sent / (hardware.network_gbs * GB * assumed.link)
            network_s += each.calls * assumed.network_call_s
    return node_s, network_s


# ---------------------------------------------------------------- servers


def forward_token_flops(model: Sized) -> float:
    """Count the FLOPs of a forward pass for one token, its head included and attention not."""
    size = size_of(model)
    return 2.0 * (size.active_layer_elements + size.hidden_size * size.vocab_size)


def decode_work(
    spec: ModelSpec, section: ServerConfig, requests: float, cached_tokens: float
) -> PhaseWork:
    """Count a decode step of a server's rank: one token for each of so many requests.

    cached_tokens: in the KV cache, of all requests. A step reads all weights: its batch meets every
    expert. Each rank gathers the logits of all ids.
    """
    memory = server_memory(spec, section)
    pairs = 2.0 * spec.attention_layers * spec.num_heads * spec.pair_features
    flops = requests * forward_token_flops(spec) + cached_tokens * pairs
    return PhaseWork(
        flops=flops / section.tp,
        hbm_bytes=memory.weights + cached_tokens * memory.kv_token_bytes,
        exchanges=server_exchanges(spec, section, requests, requests),
    )


def prefill_work(model: Sized, section: ServerConfig, work: Work) -> PhaseWork:
    """Count one pass of a server's rank over `work`; windows are taken for whole sequences."""
    size = size_of(model)
    flops = 2.0 * work.positions * size.active_layer_elements
    flops += 2.0 * work.scored * size.hidden_size * size.vocab_size
    flops += 4.0 * work.pairs * size.num_layers * size.num_heads * size.head_dim
    memory = server_memory(model, section)
    return PhaseWork(
        flops=flops / section.tp,
        hbm_bytes=memory.weights + work.positions * memory.kv_token_bytes,
        exchanges=server_exchanges(model, section, work.positions, work.scored),
    )


def server_exchanges(
    model: Sized, section: ServerConfig, tokens: float, scored: float
) -> tuple[Exchange, ...]:
    """Return what a rank of a server exchanges in a forward pass, of which rows meet the head.

    An all-reduce after attention and one after the feed-forward part of every layer, and one of the
    embedding, each a reduce-scatter and an all-gather; the logits of all ids are gathered.
    """
    size, tp, width = size_of(model), section.tp, BYTES[section.dtype]
    if tp == 1:
        return ()
    calls = 2 * size.num_layers + 1
    return (
        Exchange("tp", tp, tp, 2 * calls * tokens * size.hidden_size * width, calls),
        Exchange("tp", tp, tp, scored * size.vocab_size * width),
    )


# ---------------------------------------------------------------- learner


def train_work(
    spec: ModelSpec, config: LearnerConfig, work: Work, micro_batches: float, passes: float = 0.0
) -> PhaseWork:
    """Count the passes of one replica over `work`, on a rank of the average stage.

    passes: forward passes besides the one with its backward pass, as a loss or another model may
    need. What is recomputed comes on top. Memory traffic: for each micro-batch the weights, forward
    and backward, and the float32 gradients that they are added to; what a forward pass keeps,
    written and read. micro_batches: of the replica.
    """
    parallel, settings = config.parallel, Settings.of(config)
    split = parallel.world_size // parallel.dp
    again = recomputed_flops(spec, work, settings)
    once = forward_flops(spec, work)
    shapes = replica_shapes(spec, parallel, work.positions / micro_batches)
    kept = sum(kept_bytes(shapes, layer, settings) for layer in range(spec.num_layers))
    held = sum(average_parameters(spec, parallel))
    size = BYTES[config.dtype]
    traffic = held * ((2 + passes) * size + 2 * settings.gradient_bytes)
    forward = pass_exchanges(shapes, backward=False)
    exchanges = [each.times(1 + passes + again / once) for each in forward]
    exchanges += pass_exchanges(shapes, backward=True)
    return PhaseWork(
        flops=((3 + passes) * once + again) / split,
        hbm_bytes=micro_batches * (traffic + 2 * kept / parallel.pp),
        exchanges=tuple(each.times(micro_batches) for each in exchanges),
    )


def optimizer_work(spec: ModelSpec, config: LearnerConfig) -> PhaseWork:
    """Count an optimizer step of a rank of the average stage, with its gradients' reduction."""
    parallel = config.parallel
    dense, expert = average_parameters(spec, parallel)
    share = dense / (parallel.dp * parallel.cp) + expert / expert_data_parallel(parallel)
    return PhaseWork(0.0, UPDATE_BYTES * share, tuple(step_exchanges(config, dense, expert)))
