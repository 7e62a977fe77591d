"""Describes GPUs by their data sheets, and says what share of a data sheet work reaches."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.config.simulation import Gpu

GB = 1e9


@dataclass(frozen=True, slots=True)
class Hardware:
    """Describes a GPU by its data sheet.

    tflops: dense bfloat16. hbm_gbs: GB/s of its memory. memory_gib: of it. node_gbs, network_gbs:
    GB/s in one direction to GPUs of its node, and of its network card.
    """

    tflops: float
    hbm_gbs: float
    memory_gib: float
    node_gbs: float
    network_gbs: float


# NVIDIA's data sheets: A100 SXM 80 GB, H20, H100 SXM, H200 SXM, and one GPU of an HGX B200. They
# state NVLink in both directions together, and Hopper's and Blackwell's TFLOP/s "with sparsity",
# which is twice the dense figure. That each GPU has a network card is an assumption: HDR InfiniBand
# beside an A100, else NDR.
CATALOGUE: dict[Gpu, Hardware] = {
    "a100": Hardware(312.0, 2039.0, 80.0, 300.0, 25.0),
    "h20": Hardware(148.0, 4000.0, 96.0, 450.0, 50.0),
    "h100": Hardware(989.5, 3350.0, 80.0, 450.0, 50.0),
    "h200": Hardware(989.5, 4800.0, 141.0, 450.0, 50.0),
    "b200": Hardware(2250.0, 8000.0, 180.0, 900.0, 50.0),
}


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Says what share of a data sheet work reaches, and what it takes besides: all assumptions.

    None is measured here, and none was fitted to a published figure. The defaults are what
    well-tuned systems are said to reach on large models; docs/roofline.md shows what each changes.
    """

    hbm: float = 0.7
    """Share of the memory bandwidth that a decode step, or an optimizer's, reaches."""
    decode_mfu: float = 0.5
    """Share of the peak that the matrix products of a large decode batch reach."""
    prefill_mfu: float = 0.5
    """Share of the peak that prefill and scoring reach."""
    train_mfu: float = 0.4
    """Share of the peak that a learner's passes reach, besides their exchanges."""
    link: float = 0.8
    """Share of a link's bandwidth that large messages reach."""
    decode_step_s: float = 1e-3
    """Seconds of a decode step besides: launches, sampling, the scheduler."""
    node_call_s: float = 1e-5
    """Seconds of a collective within a node besides its bytes."""
    network_call_s: float = 3e-5
    """Seconds of a collective between nodes besides its bytes."""


ASSUMED = Efficiencies()

IDEAL = Efficiencies(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
"""Reaches the data sheet: no system of this GPU can be faster."""
