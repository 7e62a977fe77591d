"""Shares a job among ranks without a model, and tells all of them when one fails."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_opd.models.ranks import all_gather_json


@dataclass(frozen=True)
class Crew:
    """Represents one of `size` ranks. Every rank takes the same steps in the same order."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def join(cls, environment: Mapping[str, str]) -> Crew:
        """Join the world that torchrun describes; a world of one without it."""
        size = int(environment.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        # A rank may read and write for hours before it meets the others.
        dist.init_process_group("gloo", timeout=timedelta(days=7))
        return cls(dist.get_rank(), size)

    def leave(self) -> None:
        """End the world that `join` made."""
        if self.size > 1:
            dist.destroy_process_group()

    def step(self, work: Callable[[], None], *, root_only: bool = False) -> None:
        """Do `work` on every rank (or on rank 0) and wait for the others.

        ValueError: the first rank's that failed, on every rank; an OSError becomes one. Anything
        else is a defect and propagates.
        """
        failure = ""
        if not root_only or self.rank == 0:
            try:
                work()
            except ValueError as error:
                failure = str(error)
            except OSError as error:
                failure = _described(error)
        failures = [failure] if self.size == 1 else all_gather_json(failure, self)
        for failure in failures:
            if failure:
                raise ValueError(failure)


def _described(error: OSError) -> str:
    where = f" writing {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full{where}; free some space and start again: what is done is kept"
    return f"{(error.strerror or str(error)).lower()}{where}"
