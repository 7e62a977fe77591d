"""The configuration of `opd sft`."""

from __future__ import annotations

from pydantic import model_validator

from megatron_opd.config.learner import Dtype, LearnerConfig
from megatron_opd.config.rules import warmup_problem
from megatron_opd.config.section import (
    FilePath,
    PositiveInt,
    Section,
)
from megatron_opd.config.sections import RunConfig


class SftConfig(Section):
    """`opd sft`: supervised fine-tuning on the same learner."""

    run: RunConfig = RunConfig()
    init: FilePath
    """Checkpoint to start from, or a directory with only config.json and the tokenizer (random
    initialisation)."""
    output: FilePath
    """Where the Hugging Face checkpoint is written."""
    train: FilePath
    """JSONL or parquet with a prompt and a response column."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    response_key: str = "response"
    """Column of the response."""
    batch_size: PositiveInt = 64
    """Pairs per update."""
    validation: FilePath | None = None
    """Pairs, in the form of `train`, whose loss is measured and which nothing learns from."""
    validate_every: PositiveInt = 100
    """Updates between two validations; one comes before the first update and one after the last."""
    metrics: FilePath | None = None
    """JSONL file of a row per update: loss, gradient norm, learning rate, validation loss; null:
    progress lines only."""
    learner: LearnerConfig = LearnerConfig()
    save_dtype: Dtype = "bfloat16"
    """Number format in which the weights are written."""

    @model_validator(mode="after")
    def _shares(self) -> SftConfig:
        minis, parallel = self.learner.mini_batches, self.learner.parallel
        least = parallel.pp if parallel.vpp > 1 else 1
        if self.batch_size % (minis * parallel.dp) or self.batch_size < minis * parallel.dp * least:
            raise ValueError(
                "batch_size must be a multiple of learner.mini_batches * learner.parallel.dp and "
                "hold learner.parallel.pp pairs for each of them with vpp above 1, got "
                f"{self.batch_size}, {minis} * {parallel.dp}, pp={parallel.pp}, vpp={parallel.vpp}"
            )
        return self

    @model_validator(mode="after")
    def _warms_up(self) -> SftConfig:
        problem = warmup_problem(self.learner.optimizer.warmup_updates, self.run.updates)
        if problem is not None:
            raise ValueError(problem)
        return self
