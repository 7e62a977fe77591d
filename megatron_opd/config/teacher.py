"""Defines the section of a teacher: its SGLang servers, and what their weights are."""

from __future__ import annotations

from typing import Any, Literal

from megatron_opd.config.section import ChatTemplate, NonNegativeFloat, Said, TemplateKwargs
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.sources import CheckpointSource, SourceConfig
from megatron_opd.config.teacher_api import Api

Trust = Literal["measured", "any"]


class TeacherConfig(ServerConfig):
    """Describes the SGLang servers of a teacher, whose model no learner needs to know."""

    chat_template: ChatTemplate | None = None
    """Chat template in which this teacher reads its prompts: true, that of its own checkpoint; a
    path, that Jinja file; false, a prompt is its text. What was sampled follows id by id, in any of
    them. null: the ids that the student reads, or where one of the next two keys is given, the
    student's template; with scoring.alignment its own, where the student reads one. A teacher that
    was trained on chats scores as it was trained only behind prompts of its own template."""
    chat_template_kwargs: TemplateKwargs | None = None
    """Variables of this teacher's chat template, such as `enable_thinking: false`; null: those of
    data.chat_template_kwargs."""
    system_prompt: Said | None = None
    """System message in front of this teacher's prompts that have none of their own, such as what
    the student is to do without being told; null: data.system_prompt. Costs the teacher its
    tokens."""
    trust: Trust = "measured"
    """Which architectures may be served: measured, those whose scores equalled transformers'
    (docs/families.md), or any that SGLang knows. scoring.guard looks at either: it compares scores
    with sampling, and with a forward pass of transformers where there is room for one. any lets a
    model in that SGLang may serve wrongly beyond the guard's short passages."""

    api: Api = "bridge"
    """What the servers speak. bridge: SGLang with this project's plugin, which scores every
    support. Servers of somebody else, at `urls`: sglang, a stock SGLang asked through /generate;
    openai, /v1/completions that returns log-probs of its prompt (vLLM). These score at temperature
    1 the sampled ids or the teacher's likeliest ones, as JSON. chat, /v1/chat/completions, scores
    nothing: the student learns what it writes (objective sft_on_teacher; docs/teachers.md)."""
    served_name: Said | None = None
    """Name of the model in requests of openai and chat; null: the only one that the server lists.
    Needs an api other than bridge."""
    cost_per_million_tokens: NonNegativeFloat | None = None
    """Price of a million tokens that such servers read or write, in any currency, for the columns
    teacher_billed_tokens and teacher_cost of metrics.jsonl; null: no such columns."""

    source: SourceConfig = CheckpointSource()
    """What the teacher's weights are: those of its checkpoint, or the student's, now or earlier
    (docs/teachers.md). What follows the student has servers of its own, with student.model, to
    which the learner sends weights as to the student's."""

    @property
    def speaks_bridge(self) -> bool:
        """Tell whether the servers have the plugin: they say what they are and score anything."""
        return self.api == "bridge"

    @property
    def own_reading(self) -> dict[str, Any]:
        """Returns the keys that are given of how it reads prompts; none: as the student does."""
        keys = ("chat_template", "chat_template_kwargs", "system_prompt")
        return {key: value for key in keys if (value := getattr(self, key)) is not None}
