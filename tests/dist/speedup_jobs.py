"""What the ranks of a test world do about weight gradients that are added in place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_opd.config.kernels import Kernels, choose_kernels
from megatron_opd.learner import learner, world
from tests.dist import jobs


def update(out: Path, *, fused: bool, **arguments: Any) -> None:
    """jobs.update on a machine whose layers could add their gradients in place."""

    def with_fusion(cuda: bool) -> Kernels:
        return replace(choose_kernels(cuda), fused_gradients=fused)

    world.choose_kernels = with_fusion
    build = learner.build_model

    def checked(*given: Any) -> Any:
        chunks = build(*given)
        for chunk in chunks:
            assert chunk.config.gradient_accumulation_fusion == fused
            assert not chunk.module.output_layer.gradient_accumulation_fusion, "apex is not here"
        return chunks

    learner.build_model = checked
    jobs.update(out, **arguments)


def refused(out: Path, **arguments: Any) -> None:
    """A machine without kernels for it says so in one line."""
    try:
        jobs.make_learner(**arguments)
    except ValueError as error:
        assert "learner.megatron.gradient_accumulation_fusion must be false" in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        return
    raise AssertionError("it was built")
