"""What can happen to a server in a weight sync, and how faults share the processes of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Tree = dict[str, Any]
VICTIMS, MOST_FAULTS = 4, 6
"""Servers that a round can lose, one more is never hurt; and faults in a round."""

MODEL: Tree = {
    # 5.3 M parameters, 21 MB in float32: large enough for a fault to come while they are sent
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "tie_word_embeddings": True,
    "vocab_size": 509,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "initializer_range": 0.05,
    "hidden_act": "silu",
}
FLIPPED = "flipped bit"


@dataclass(frozen=True)
class Fault:
    """phase: in which it happens; staged: with staging. how: KILL, STOP or FLIPPED.

    control: what keeps the sync from mending it: one_try or unverified.
    """

    phase: str
    how: str
    staged: bool = False
    control: str | None = None

    def __str__(self) -> str:
        staged = " (staging)" if self.staged else ""
        control = f", control: {self.control}" if self.control else ""
        return f"{self.how} in {self.phase}{staged}{control}"

    def asked(self) -> Tree:
        """As JSON."""
        return asdict(self)

    @property
    def loses(self) -> int:
        """How many servers it costs."""
        return int(self.how != FLIPPED)

    @property
    def ends_round(self) -> bool:
        """Whether no weight sync can follow it."""
        return self.control is not None


_STAGED = ("stage", "verify", "send")
_PAUSED = ("pause", "begin", "send", "flush", "end", "verify", "continue")
KINDS = (
    *(Fault(phase, how, staged=True) for phase in _STAGED for how in ("KILL", "STOP")),
    *(Fault(phase, how) for phase in _PAUSED for how in ("KILL", "STOP")),
    Fault("send", FLIPPED),
)
CONTROLS = (Fault("send", "KILL", control="one_try"), Fault("send", FLIPPED, control="unverified"))


def rounds(missing: Mapping[str, Fault]) -> list[dict[str, Fault]]:
    """Which rows share a learner and its servers: as many as there are servers to lose.

    In the order of `missing`, as far as staging allows.
    """
    found: list[dict[str, Fault]] = []
    order = {name: number for number, name in enumerate(missing)}
    for staged in (False, True):
        queue = {name: fault for name, fault in missing.items() if fault.staged == staged}
        while queue:
            planned: dict[str, Fault] = {}
            for name, fault in list(queue.items()):
                lost = sum(other.loses for other in planned.values())
                ended = any(other.ends_round for other in planned.values())
                fits = lost + fault.loses <= VICTIMS and len(planned) < MOST_FAULTS
                if fits and not (ended and fault.ends_round):
                    planned[name] = queue.pop(name)
            # one that ends the round comes last
            found.append(dict(sorted(planned.items(), key=lambda item: item[1].ends_round)))
    return sorted(found, key=lambda planned: min(order[name] for name in planned))
