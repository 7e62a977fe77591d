"""Finds what Megatron would reject of a configuration, before any process is started."""

from __future__ import annotations

import torch

from megatron_opd.config.kernels import choose_kernels
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.model import DTYPES, ddp_config, transformer_config
from megatron_opd.learner.optimizer import optimizer_config
from megatron_opd.learner.routing_checks import check_replay
from megatron_opd.models.spec import ModelSpec


def check_overrides_of(spec: ModelSpec, config: LearnerConfig) -> None:
    """Build every Megatron configuration once. ValueError: one line naming key, rule and value."""
    cuda = torch.cuda.is_available()
    settings = transformer_config(spec, config, choose_kernels(cuda), cuda=cuda)
    check_replay(config.routing_replay, spec, settings)
    overlap = ddp_config(config, cuda=cuda).overlap_param_gather
    optimizer_config(config.optimizer, DTYPES[config.dtype], overlap)
