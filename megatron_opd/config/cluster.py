"""Defines the section that says how a run uses the machines it is on."""

from __future__ import annotations

from megatron_opd.config.section import Section


class ClusterConfig(Section):
    """Says how the processes of a run share the machines that they are on."""

    share_gpus: bool = False
    """Lets several processes use one GPU, such as all of a run on a machine with a single one:
    lists of `gpus` may overlap, and what is laid out by itself starts again at GPU 0 when none is
    free. Lower mem_fraction_static then: each server plans as if the GPU were its own. A learner
    and student servers that share one sync weights over gloo, which is slower. false: an overlap is
    an error."""
