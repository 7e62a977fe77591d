"""Judges by learner.mismatch_limit whether learner and servers compute the same model.

Invariant: with `refuse` no optimizer step is made on an update that exceeds the limits, as every
rank of the learner compares with them between backward pass and step (learner/learner.py). A
judge is made for each start: of a run, of a resumed one, and after a lost learner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.inputs.extra_args import settings_of
from megatron_opd.metrics.mismatch_gap import Bound, MismatchGap, MismatchLimits
from megatron_opd.metrics.mismatch_limits import ENOUGH, limits_of
from megatron_opd.transport.messages import UpdateMetrics

NOT_JUDGED: dict[str, Any] = {
    "first_mismatch_verdict": "not judged",
    "first_mismatch_tokens": 0,
    "first_mismatch_mean_abs_dp": None,
    "first_mismatch_limit_abs_dp": None,
    "first_mismatch_k3_nats": None,
    "first_mismatch_limit_k3_nats": None,
}
"""What the summary of a run says whose first update was not judged."""
OFF = NOT_JUDGED | {"first_mismatch_verdict": "off"}
"""What the summary of a run without a judge says."""
REMEDY = (
    "learner and servers compute different models. Compare what the servers loaded with "
    "student.model: its config.json (rope settings, eps), student.extra_args, missing tensors, "
    "another checkpoint at student.urls, the order of experts; `opd mismatch CONFIG` measures more"
)


class MismatchJudge:
    """Judges the updates of one start until they had ENOUGH tokens of the learner's own version.

    An update without any is not judged, and the next one is. say: tells the user. refuses: before
    the step of an update that exceeds the limits.
    """

    def __init__(
        self, limits: MismatchLimits, say: Callable[[str], None], *, refuses: bool
    ) -> None:
        self._limits, self._say, self._refuses = limits, say, refuses
        self._seen, self._exceeded = MismatchGap(), False

    @classmethod
    def of(
        cls, config: Config, say: Callable[[str], None], *, experts: bool, gpu: bool
    ) -> MismatchJudge | None:
        """Return the judge of a start; None: it is off, or the two sides cannot be compared."""
        action = config.learner.mismatch_limit
        limits = limits_of(config, settings_of(config), experts=experts, gpu=gpu)
        if limits is None or action == "off":
            return None
        return cls(limits, say, refuses=action == "refuse")

    @property
    def bound(self) -> Bound | None:
        """Returns what the next update must keep to, for the learner to refuse it before its step.

        None: nothing, or it is judged afterwards.
        """
        if not self._refuses or self._seen.tokens >= ENOUGH:
            return None
        return Bound(self._limits, self._seen)

    def refusal(self, update: int, gap: MismatchGap) -> UserError:
        """Return what ends the run whose learner refused an update with this gap."""
        self._seen, self._exceeded = self._seen.plus(gap), True
        return UserError(
            f"learner.mismatch_limit refuse: before the optimizer step of update {update}, "
            f"{self._figures()}: {REMEDY}. To train all the same: learner.mismatch_limit: warn"
        )

    def see(self, update: int, metrics: UpdateMetrics) -> None:
        """Judge an update that was made, and tell the user when that says something new."""
        gap = _gap_of(metrics)
        if not gap.tokens or self._seen.tokens >= ENOUGH or self._exceeded:
            return
        first = not self._seen.tokens
        self._seen = self._seen.plus(gap)
        self._exceeded = not self._limits.allow(self._seen)
        message = f"learner.mismatch_limit: at update {update}, {self._figures()}"
        if self._exceeded:
            self._say(f"warning: {message}: {REMEDY}")
        elif first:
            self._say(f"{message}: within limits")

    def summary(self) -> dict[str, Any]:
        """Return what the run's summary says."""
        if not self._seen.tokens:
            return NOT_JUDGED
        most = self._limits.over(self._seen.tokens)
        return {
            "first_mismatch_verdict": "exceeds limits" if self._exceeded else "within limits",
            "first_mismatch_tokens": self._seen.tokens,
            "first_mismatch_mean_abs_dp": self._seen.mean_abs_dp,
            "first_mismatch_limit_abs_dp": most.mean_abs_dp,
            "first_mismatch_k3_nats": self._seen.mean_k3_nats,
            "first_mismatch_limit_k3_nats": most.mean_k3_nats,
        }

    def _figures(self) -> str:
        seen, most = self._seen, self._limits.over(self._seen.tokens)
        return (
            f"|p_learner - p_sampler| is {seen.mean_abs_dp:.2g} on average (limit "
            f"{most.mean_abs_dp:.2g}) and k3 {seen.mean_k3_nats:.2g} nats (limit "
            f"{most.mean_k3_nats:.2g}) over {seen.tokens} tokens"
        )


def _gap_of(metrics: UpdateMetrics) -> MismatchGap:
    """Return what an update measured: nothing without a token of the learner's own version."""
    tokens = metrics.mismatch_tokens
    mean_dp, mean_k3 = metrics.probs_diff_mean, metrics.mismatch_k3_nats
    if mean_dp is None or mean_k3 is None:
        return MismatchGap()
    return MismatchGap(tokens, tokens * mean_dp, tokens * mean_k3)
