"""Which layouts meet: a case is one kind of server, and every learner that is compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.case_rows import fingerprint_of
from harness.tiny_models import COMMON as TINY
from harness.tiny_models import MODELS as TINY_MODELS

Tree = dict[str, Any]
LEARNERS: Mapping[str, Tree] = {
    "1": {},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
}
SERVERS: Mapping[str, Tree] = {"tp1": {}, "tp2": {"tp": 2}, "tp2_ep2": {"tp": 2, "ep": 2}}
MATCHED = {"tp1": "1", "tp2": "tp2", "tp2_ep2": "tp2_ep2"}
"""The learner that is split as a server is."""
DTYPES = ("float32", "bfloat16")
LENGTHS: Mapping[str, int] = {"1x": 48, "5x": 240}
SEEDS = (0, 1, 2)
PROMPTS = 10  # of a seed
PROMPT_TOKENS = 8
COMMON: Tree = TINY | {"tie_word_embeddings": False}
MODELS: Mapping[str, Tree] = {
    "moe": TINY_MODELS["moe"] | COMMON | {"num_experts": 8},
    "dense": COMMON | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}
LOGIT_STD = 3.0  # about 2 nats of entropy: peaked, as a trained model's
HEAD_GAIN = LOGIT_STD / (COMMON["initializer_range"] * COMMON["hidden_size"] ** 0.5)


@dataclass(frozen=True)
class Case:
    """One kind of server. deterministic: its products do not depend on what is batched."""

    model: str
    server: str
    dtype: str
    deterministic: bool = False

    @property
    def name(self) -> str:
        """Names its row."""
        kernels = "-deterministic" if self.deterministic else ""
        return f"{self.model}-{self.server}-{self.dtype}{kernels}"

    @property
    def learners(self) -> tuple[str, ...]:
        """Which learners score what it sampled; fewer where only the kernels are in question."""
        if self.deterministic:
            return tuple(dict.fromkeys(("1", MATCHED[self.server])))
        return tuple(name for name in LEARNERS if self.model == "moe" or "ep2" not in name)

    def fingerprint(self) -> str:
        """Changes with the project's code, this study's, and what is asked."""
        asked = [asdict(self), self.learners, SERVERS[self.server], MODELS[self.model]]
        return fingerprint_of(asked, "studies/mismatch_grid")


def all_cases() -> list[Case]:
    """First the layouts, then the dense model, then the kernels: it may be stopped between them."""
    layouts = [Case("moe", server, dtype) for dtype in DTYPES for server in SERVERS]
    dense = [Case("dense", server, dtype) for dtype in DTYPES for server in ("tp1", "tp2")]
    kernels = [Case("moe", server, dtype, True) for dtype in DTYPES for server in SERVERS]
    return [*layouts, *dense, *kernels]
