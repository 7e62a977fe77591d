"""Defines the configuration of `opd sft`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_opd.config.learner import Dtype, LearnerConfig
from megatron_opd.config.rules import warmup_problem
from megatron_opd.config.section import (
    ChatTemplate,
    FilePath,
    PositiveInt,
    Said,
    Section,
    TemplateKwargs,
)
from megatron_opd.config.sections import RunConfig
from megatron_opd.config.wording import shown

LossOn = Literal["all", "last"]
"""Which answers of a chat are learnt."""


class SftConfig(Section):
    """Configures `opd sft`, supervised fine-tuning on the same learner."""

    run: RunConfig = RunConfig()
    """Number of updates, seed and run directory, as in `opd run`."""
    init: FilePath
    """Hugging Face checkpoint to start from, or a directory with only config.json and the
    tokenizer, which starts from random weights."""
    output: FilePath
    """Directory in which the fine-tuned Hugging Face checkpoint is written."""
    train: FilePath
    """File, folder or pattern of files with a prompt and a response column, to train on."""
    prompt_key: str = "prompt"
    """Name of the column that holds the prompt: text, or with chat_template a list of messages."""
    tools_key: str = "tools"
    """Name of the column that holds the tools of a chat, as data.tools_key. Read with chat_template
    only."""
    response_key: str = "response"
    """Name of the column that holds the response; only its tokens are trained on."""
    messages_key: str | None = None
    """Name of the column that holds whole chats, instead of prompt_key and response_key. Needs
    chat_template. Each answer is learnt behind what the template writes before it; a chat is one
    example, or several where the template rewrites earlier messages. null: prompt_key and
    response_key."""
    loss_on: LossOn = "all"
    """Which assistants' messages of a chat are learnt: all, or the last alone, whose earlier ones
    are then given. last learns less from as much computing. Needs messages_key."""
    chat_template: ChatTemplate = False
    """Renders prompts with a chat template as data.chat_template of `opd run` does: true, the
    tokenizer's; a path, that Jinja file; false, a prompt is its text. A response is then what the
    template writes behind the prompt, up to its end token."""
    system_prompt: Said | None = None
    """System message of chats that have none, as data.system_prompt. Needs chat_template."""
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict[str, Any])
    """Variables of the chat template, as data.chat_template_kwargs. Needs chat_template."""
    batch_size: PositiveInt = 64
    """Examples per update. Raising it lowers the variance of the gradient and costs
    time per update in proportion."""
    validation: FilePath | None = None
    """File of examples, in the form of `train`, whose loss is measured and which are not trained
    on; null: no validation."""
    validate_every: PositiveInt = 100
    """Number of updates between two validations; one more comes before the first update and one
    after the last. Lower measures more often and takes longer."""
    metrics: FilePath | None = None
    """JSONL file with a row per update: loss, gradient norm, learning rate, validation loss; null:
    progress lines only."""
    learner: LearnerConfig = LearnerConfig()
    """The learner, its parallel layout and its optimizer, as in `opd run`."""
    save_dtype: Dtype = "bfloat16"
    """Number format in which the weights are written; float32 takes twice the disk space of
    bfloat16."""

    @model_validator(mode="after")
    def _only_a_template_has_messages(self) -> SftConfig:
        for key in ("messages_key", "system_prompt", "chat_template_kwargs"):
            if getattr(self, key) and not self.chat_template:
                raise ValueError(
                    f"{key} needs chat_template: true or a file, got {shown(getattr(self, key))} "
                    "without it; set chat_template: true or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _only_chats_have_several_answers(self) -> SftConfig:
        if self.loss_on != "all" and self.messages_key is None:
            raise ValueError(
                f"loss_on must be all without messages_key, got {self.loss_on}: a response is "
                "learnt whole; name the column of chats in messages_key, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _shares(self) -> SftConfig:
        minis, parallel = self.learner.num_mini_batches, self.learner.parallel
        if self.batch_size % minis or self.batch_size < minis * parallel.least_samples:
            raise ValueError(
                "batch_size must be a multiple of learner.num_mini_batches, at least "
                "learner.num_mini_batches * learner.parallel.dp and with learner.parallel.vpp "
                f"above 1 learner.parallel.pp times that, got {self.batch_size}, {minis} * "
                f"{parallel.dp}, pp={parallel.pp}, vpp={parallel.vpp}"
            )
        return self

    @model_validator(mode="after")
    def _warms_up(self) -> SftConfig:
        problem = warmup_problem(self.learner.optimizer.warmup_steps, self.run.max_steps)
        if problem is not None:
            raise ValueError(problem)
        return self
