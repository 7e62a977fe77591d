"""Define the KL penalty of objectives from rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megatron_opd.config.section import PositiveFloat, Section

KlDirection = Literal["reverse", "forward"]
UNWEIGHTED = "k3_unweighted"


class KlPenalty(Section):
    """Adds coefficient * a divergence of student and reference, estimated on the sampled tokens.

    The tokens come from the sampler o at the prefixes it visited, not from the student p. reverse:
    KL(p || reference), each token weighed by p / o whatever `correction` is: nothing bounds that
    weight when rollouts are old. forward, with `to: sampler` alone: KL(o || p), which needs no
    weight. Value and gradient of every accepted combination but k3_unweighted are unbiased
    (losses/penalty.py; docs/estimators.md shows it).
    """

    coefficient: PositiveFloat
    """Weight of the penalty in the loss of a token. Higher keeps the student closer to the
    reference and lets it learn less from the reward (GEPO trains with 0.005)."""
    to: Literal["teacher", "sampler"] = "teacher"
    """The reference: the teacher (any frozen model can serve as one), or the sampler's own
    log-probs (CPPO)."""
    direction: KlDirection | None = None
    """reverse: KL of student and reference, an expectation over the student (mode-seeking);
    forward: KL of sampler and student, an expectation over the sampler. Null: reverse to the
    teacher and for k3_unweighted, forward to the sampler."""
    estimator: Literal["k1", "k2", "k3", "k3_unweighted"] = "k3"
    """How the divergence is estimated from one token. reverse: k1 is p/o times the log-ratio; k2
    and k3 are the same and have no noise where student and reference agree. forward: k1 is the
    log-ratio, k3 is never negative and pulls a token by p/o - 1; k2 does not exist. k3_unweighted,
    reverse alone: k3 without p/o, as TRL, verl and, to the sampler, GEPO's CPPO-KL have it; for
    comparisons, as it is biased and pulls a token without bound, by reference/p - 1."""

    @property
    def applied_direction(self) -> KlDirection:
        """Return the direction in force."""
        reverse = self.to == "teacher" or self.estimator == UNWEIGHTED
        return self.direction or ("reverse" if reverse else "forward")

    def text(self) -> str:
        """Describes what the penalty adds to the loss of a token."""
        reference = {"teacher": "q", "sampler": "o"}[self.to]
        text = {
            ("reverse", "k1"): "rho_t x, rho_t = p_t / o_t",
            ("reverse", "k2"): "rho_t (exp(-x) - 1 + x), rho_t = p_t / o_t (k2 is k3)",
            ("reverse", "k3"): "rho_t (exp(-x) - 1 + x), rho_t = p_t / o_t",
            ("reverse", UNWEIGHTED): "(exp(-x) - 1 + x)",
            ("forward", "k1"): "(-x)",
            ("forward", "k3"): "(exp(x) - 1 - x)",
        }[self.applied_direction, self.estimator]
        return f"{self.coefficient:g} {text}, x = log p_t - log {reference}_t"

    def estimates(self) -> str:
        """Names the divergence it estimates at the visited prefixes, and where it is unbiased.

        losses/penalty.py has the proof.
        """
        reference = "q" if self.to == "teacher" else "o"
        if self.estimator == UNWEIGHTED:
            return {
                "teacher": "KL(p || q), biased: the gradient is that of KL(q || p) on policy "
                "already, the value is off where o is not p",
                "sampler": "chi^2(o || p) - KL(o || p), as KL(p || o) biased in value and gradient",
            }[self.to]
        if self.applied_direction == "reverse":
            covered = " (value: and q)" if self.to == "teacher" and self.estimator != "k1" else ""
            return f"KL(p || {reference}); value and gradient unbiased where o covers p{covered}"
        where = "" if self.estimator == "k1" else " where o covers p"
        return f"KL(o || p); value and gradient unbiased{where}"

    def bias(self) -> list[str]:
        """Lists what the penalty biases the gradient by."""
        return ["the penalty's tokens are not weighed by p / o"] * (self.estimator == UNWEIGHTED)

    def sources(self) -> list[str]:
        """Lists the papers it comes from."""
        if self.estimator == UNWEIGHTED:
            return ["CPPO-KL (GEPO sec. 4.1)" if self.to == "sampler" else "GRPO's penalty"]
        to_sampler = self.to == "sampler" and self.applied_direction == "forward"
        return ["after CPPO-KL (GEPO)" if to_sampler else "GRPO's penalty, weighed by p / o"]

    @model_validator(mode="after")
    def _is_sound(self) -> KlPenalty:
        if self.applied_direction == "forward" and self.to == "teacher":
            raise ValueError(
                "direction forward needs to sampler, got to teacher: tokens come from the sampler, "
                "and KL(teacher || student) would weigh them by teacher / sampler; use "
                "objective.type forward_kl on support.type teacher_topk, or direction reverse"
            )
        if self.applied_direction == "forward" and self.estimator == UNWEIGHTED:
            raise ValueError(
                "estimator k3_unweighted needs direction reverse, got forward: KL(sampler || "
                "student) needs no weight; use estimator k3"
            )
        if self.applied_direction == "forward" and self.estimator == "k2":
            raise ValueError(
                "estimator k2 needs direction reverse, got forward: on the sampler's tokens the "
                "gradient of (log p - log o)^2 / 2 is no divergence's; use estimator k3"
            )
        return self
