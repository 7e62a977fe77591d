"""What the ranks of a test world do about shares of different sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_opd.learner import learner
from megatron_opd.learner.forward import run_mini_batch
from megatron_opd.learner.micro_batch import DistilMicro
from megatron_opd.learner.totals import Totals
from megatron_opd.learner.world import World
from tests.dist import jobs


def mean_of_means(out: Path, **arguments: Any) -> None:
    """jobs.update, wrong: the mean over ranks of what each is in the mean. Data parallelism."""

    def averaged(
        model: Any, head: Any, micros: Sequence[DistilMicro], loss: Any, world: World
    ) -> Totals:
        real = [micro for micro in micros if not micro.rows.is_filler]
        own = sum(len(micro.loss_input.draws.path_T) for micro in real)
        total = torch.tensor(own)
        dist.all_reduce(total)
        factor = int(total) / (world.size * own)

        def weighed(out_1s: torch.Tensor, micro: DistilMicro) -> tuple[torch.Tensor, Totals]:
            loss_sum, totals = loss(out_1s, micro)
            return loss_sum * factor, totals

        return run_mini_batch(model, head, micros, weighed, world)

    learner.run_mini_batch = averaged
    jobs.update(out, **arguments)
