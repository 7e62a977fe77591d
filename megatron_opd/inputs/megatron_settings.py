"""Checks Megatron's own settings before anything is started."""

from __future__ import annotations

import warnings

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.errors import UserError
from megatron_opd.models.spec import ModelSpec
from sglang_bridge.imports import keep_out


def check_megatron(spec: ModelSpec, config: LearnerConfig) -> None:
    """Raise UserError for fields that may not be set, or values that Megatron rejects.

    Megatron takes seconds to import: a configuration without such fields does not wait for it.
    """
    own = config.megatron or config.ddp or config.optimizer.megatron
    if not own and config.routing_replay == "off":
        return
    # Megatron takes its kernels wherever they are installed. They import models of transformers,
    # which breaks in a process that left torch out (data/without_torch.py), and none computes here.
    keep_out("fla")
    try:
        with warnings.catch_warnings():  # Megatron's import warns of what else could be installed
            warnings.simplefilter("ignore")
            from megatron_opd.learner.refusals import check_overrides_of

            check_overrides_of(spec, config)
    except ValueError as error:
        raise UserError(str(error)) from None
