"""Describes rotary positions, and computes what YaRN scales by. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Describes rotary positions. theta: base of the wavelengths. factor: stretches long ones.

    linear stretches all of them; llama3 those above original_max_position / low_freq_factor
    positions, none below original_max_position / high_freq_factor, and blends in between. yarn
    stretches those that turn fewer than beta_slow times within original_max_position, none that
    turn beta_fast times or more, and blends in between, from a whole feature to a whole feature
    with truncate; cosines and sines are multiplied by attention_factor and attn_factor.
    share: the part of a head's features that turn, the first ones. interleaved: neighbours turn
    together, not a feature of either half.
    """

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    share: float = 1.0
    interleaved: bool = False
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    attn_factor: float = 1.0

    def features(self, head_dim: int) -> int:
        """Return how many of a head's features turn, as transformers counts them."""
        return int(head_dim * self.share)

    @property
    def logit_factor(self) -> float:
        """Returns what turning multiplies products of queries and keys by."""
        return (self.attention_factor * self.attn_factor) ** 2


def yarn_attention_factor(factor: float, mscale: float | None, all_dim: float | None) -> float:
    """Return what YaRN multiplies cosines and sines by, where no key gives it.

    mscale, all_dim: the settings mscale and mscale_all_dim; without both 1 and 0.
    """

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale is None or all_dim is None:
        return scale(1)
    return scale(mscale) / scale(all_dim)


def yarn_ramp(rope: Rope, features: int) -> tuple[float, float]:
    """Return the pairs of features between which YaRN blends.

    Of `features` that turn, the pair d of a base b has the wavelength 2 pi b^(2 d / features).
    """

    def pair(turns: float) -> float:
        positions = rope.original_max_position / (turns * 2 * math.pi)
        return (features * math.log(positions)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, features - 1)
    return low, high + 0.001 if low == high else high


def yarn_note(key: str, rope: Rope) -> str | None:
    """Return what transformers makes of YaRN's attn_factor; None: there is none."""
    if rope.attn_factor == 1:
        return None
    return (
        f"{key}: attn_factor {rope.attn_factor:g} of its rotary settings multiplies cosines and "
        "sines in SGLang, and so in the learner; transformers ignores it, and computes another "
        "model from the same files"
    )
