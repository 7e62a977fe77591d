"""What the ranks of a test world do about the log-probs of a batch's start."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_opd.learner import learner, passes
from megatron_opd.learner.micro_batch import DistilMicro
from tests.dist import jobs


class Unshared(passes.ForwardPasses):
    """The first mini-batch gets a pass of its own too."""

    def with_prox(self, minis: Sequence[Sequence[DistilMicro]]) -> list[list[DistilMicro]]:
        return [self._with_own(mini) for mini in minis]


def update(out: Path, *, shared: bool, **arguments: Any) -> None:
    """jobs.update; rank 0 writes to passes.json of how many micro-batches each pass was."""
    made: list[int] = []
    collect = passes.collect_caches

    def counted(model: Any, micros: Any, *rest: Any) -> Any:
        made.append(len(micros))
        return collect(model, micros, *rest)

    passes.collect_caches = counted
    if not shared:
        learner.ForwardPasses = Unshared
    jobs.update(out, **arguments)
    if os.environ["RANK"] == "0":
        (out / "passes.json").write_text(json.dumps(made))
