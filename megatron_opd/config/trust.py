"""Lists the trust regions: one small section each, chosen by `type`.

A trust region acts on a ratio r and an advantage A and says what is maximised in place of r A.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from megatron_opd.config.section import NonNegativeFloat, PositiveFloat, Section, type_or

Line = tuple[str, str]
"""A line of a formula: label and text."""


class Trust(Section):
    """Bounds how far one batch can move the student.

    bounds: whether it stops any gradient. whole_mini_batch: it must see all actions of a mini-batch
    before the loss of one is known.
    """

    bounds: ClassVar[bool] = True
    whole_mini_batch: ClassVar[bool] = False

    def text(self, r: str, advantage: str) -> str:
        """Describes what is maximised in place of `r` times `advantage`."""
        return f"{r} {advantage}"

    def notes(self) -> list[Line]:
        """Lists further lines of the formula."""
        return []

    def bias(self) -> list[str]:
        """Lists what the trust region biases the gradient by."""
        return []

    def sources(self) -> list[str]:
        """Lists the papers it comes from, where they are not the objective's own."""
        return []


class NoTrust(Trust):
    """Uses no trust region (AsyncOPD Eq. 7, "no clip")."""

    bounds: ClassVar[bool] = False
    type: Literal["none"] = "none"


class ClipTrust(Trust):
    """Takes PPO's minimum, min(r A, clip(r, 1 - low, 1 + high) A).

    Only a ratio that has moved past an edge the way A pushes it loses its gradient. GEPO Eq. 8 and
    10 write a plain clip(r) A instead, which drops the gradient outside both edges whatever A is;
    PPO, GRPO, GSPO, TRL and verl take the minimum, and so does this, for gepo too.
    """

    type: Literal["clip"] = "clip"
    low: NonNegativeFloat = 0.2
    """Distance of the lower edge from 1: r below 1 - low gains nothing more where A < 0. Raising it
    lets the student move further on one batch."""
    high: NonNegativeFloat = 0.2
    """Distance of the upper edge from 1: r above 1 + high gains nothing more where A > 0. Raising
    it lets the student move further on one batch."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Bound c of dual-clip PPO: where A < 0 the maximised value is at least c * A. Raising it lets
    actions of large ratio push harder; null turns it off."""

    def text(self, r: str, advantage: str) -> str:
        """Describes what is maximised in place of `r` times `advantage`."""
        low, high = 1 - self.low, 1 + self.high
        text = f"min({r} {advantage}, clip({r}, {low:g}, {high:g}) {advantage})"
        if self.dual is None:
            return text
        return f"(max({text}, {self.dual:g} {advantage}) if {advantage} < 0, else {text})"

    def notes(self) -> list[Line]:
        """Lists further lines of the formula."""
        return [
            ("clip", "PPO's minimum, as above; GEPO Eq. 8 and 10 write a plain clip of the ratio")
        ]

    def bias(self) -> list[str]:
        """Lists what the trust region biases the gradient by."""
        return ["clipped actions have no gradient"]

    def sources(self) -> list[str]:
        """Lists the papers it comes from, where they are not the objective's own."""
        return [] if self.dual is None else ["dual-clip PPO (arXiv 1912.09729)"]


class M2Trust(Trust):
    """Masks the actions that moved furthest the way A pushes them (M2PO, arXiv 2510.01161, Alg. 1).

    Candidates are the actions of the whole mini-batch with r > 1 and A > 0, or r < 1 and A < 0: the
    ones that PPO's minimum could clip, as in the authors' code (github.com/Infini-AI-Lab/M2PO,
    verl/trainer/ppo/core_algos.py, `_get_trust_region_tokens_delta_sq`). Those of largest
    (log r)^2 are masked until the second moment is within the threshold; `moment` says what that
    is the mean of. The loss is still averaged over all actions, the masked ones too.
    """

    whole_mini_batch: ClassVar[bool] = True
    type: Literal["m2"] = "m2"
    threshold: PositiveFloat = 0.04
    """Largest second moment, the mean of (log r)^2 over candidates (0.04 in the paper). Raising it
    masks fewer actions and lets the student move further on one batch."""
    moment: Literal["kept", "capped"] = "kept"
    """What the second moment is the mean of. kept: the candidates that are not masked (Algorithm 1;
    AReaL's `get_m2po_loss_mask` too, whose candidates are all tokens). capped: all candidates, one
    beyond the limit counted as the limit (the authors' code: `kpo_clip_harmful_tokens`,
    `_solve_tau_from_sorted_delta2`); capped masks more."""
    least_low: NonNegativeFloat | None = None
    """Distance from 1 down to which r is never masked where A < 0, however small the threshold (the
    authors' code: `miniclip_low`, 0.3, which their scripts leave out); null: none. Raising it masks
    less."""
    least_high: NonNegativeFloat | None = None
    """The same upwards where A > 0 (`miniclip_high`, 0.5)."""

    def text(self, r: str, advantage: str) -> str:
        """Describes what is maximised in place of `r` times `advantage`."""
        limit = f"{self.threshold:g}"
        mean = {
            "kept": f"to a mean of {limit}",
            "capped": f"as long as the mean with the others capped at them is {limit}",
        }[self.moment]
        low, high = 1 - (self.least_low or 0), 1 + (self.least_high or 0)
        free = f"; those within {low:g} and {high:g} always" if low < high else ""
        return (
            f"({r} {advantage} if kept, else 0; of the mini-batch's actions that moved the way "
            f"{advantage} pushes them those of least (log {r})^2 are kept, {mean}{free})"
        )

    def bias(self) -> list[str]:
        """Lists what the trust region biases the gradient by."""
        return ["masked actions have no gradient"]

    def sources(self) -> list[str]:
        """Lists the papers it comes from, where they are not the objective's own."""
        return ["M2PO (arXiv 2510.01161)"]


TrustConfig = Annotated[
    Annotated[NoTrust, Tag("none")]
    | Annotated[ClipTrust, Tag("clip")]
    | Annotated[M2Trust, Tag("m2")],
    Discriminator(type_or("none")),
]
