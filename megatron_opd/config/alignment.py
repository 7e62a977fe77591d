"""Defines how a teacher of another tokenizer scores the student's tokens."""

from __future__ import annotations

from typing import Literal

from megatron_opd.config.section import Section

Unaligned = Literal["drop", "chunk"]


class AlignmentConfig(Section):
    """Says how scores follow from a teacher that reads the same text in tokens of its own."""

    unaligned: Unaligned = "drop"
    """What becomes of tokens that are none of the teacher's. drop: where a sampled token is one of
    the teacher's too, each cached id is scored by the teacher's single token of the same bytes;
    what has no such score carries no loss. chunk: the smallest spans that both cut into whole
    tokens are compared, log-probs summed over each; of the sampled tokens alone, for
    objective.type reverse_kl with advantage rollout and support.type path. The bias of each is in
    docs/tokenizers.md."""

    def text(self) -> str:
        """Describe what is compared, and the bias of it, in one line."""
        return {
            "drop": "scores by single tokens of the same bytes, where a sampled token is one of "
            "the teacher's too; bias: longer tokens of the same bytes are not counted, and what "
            "has no score has no loss",
            "chunk": "log-probs summed over the spans that both tokenizers cut into whole tokens; "
            "bias: the teacher's own cut of a span alone is counted; the value counts a span "
            "once a token",
        }[self.unaligned]
