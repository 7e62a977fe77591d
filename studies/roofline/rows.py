"""Holds published speeds whose settings are published too, and says why others are left out.

NeMo-RL's page "Performance", release 0.6, H100 BF16 (docs/about/performance-summary.md of
NVIDIA-NeMo/RL at 7ea279ab; recipes in examples/configs/recipes/llm/performance): GRPO on
OpenMathInstruct-2, Megatron-Core and vLLM, averages of five steps. The page has sizes of model,
batch, lengths and layouts. Which GPUs sample and which train, and what is recomputed, is in the
recipes. Tokens are those of prompts and responses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """Describes a published run.

    samples, mini_batches: of a step. mean: tokens of a sample with its prompt; no sample has more
    than `longest`. gpus: all. sampling: those that sample while the others train; 0: all of them
    do both, in turn. server_tp: GPUs of a server. layout: of the learner, without dp.
    tokens_per_s, step_s: as published, the first for each GPU.
    """

    name: str
    model: str
    gpus: int
    samples: int
    mean: int
    longest: int
    server_tp: int
    layout: dict[str, int]
    tokens_per_s: float
    step_s: float
    mini_batches: int = 1
    sampling: int = 0
    recompute: str = "none"

    @property
    def samplers(self) -> int:
        """Returns the GPUs that sample."""
        return self.sampling or self.gpus

    @property
    def trainers(self) -> int:
        """Returns the GPUs that train."""
        return self.gpus - self.sampling


SMALL, LARGE = "Qwen3-30B-A3B", "Qwen3-235B-A22B"
WIDE = {"tp": 2, "cp": 2, "ep": 16, "pp": 8}
NEMO = (
    PublishedRun(
        name="30B-A3B on policy, 32",
        model=SMALL,
        gpus=32,
        samples=2048,
        mini_batches=4,
        mean=3203,
        longest=4096,
        server_tp=2,
        layout={"ep": 8},
        tokens_per_s=1102,
        step_s=192,
    ),
    PublishedRun(
        name="30B-A3B one step off, 32",
        model=SMALL,
        gpus=32,
        sampling=16,
        samples=2048,
        mini_batches=4,
        mean=3201,
        longest=4096,
        server_tp=2,
        layout={"ep": 8, "pp": 2},
        tokens_per_s=1414,
        step_s=152,
    ),
    PublishedRun(
        name="30B-A3B eight steps off, 192",
        model=SMALL,
        gpus=192,
        sampling=64,
        samples=2048,
        mini_batches=4,
        mean=3206,
        longest=4096,
        server_tp=2,
        layout={"ep": 8},
        tokens_per_s=1025,
        step_s=34.5,
    ),
    PublishedRun(
        name="235B-A22B on policy, 128",
        model=LARGE,
        gpus=128,
        samples=512,
        mean=5698,
        longest=8192,
        server_tp=16,
        layout=WIDE,
        recompute="full",
        tokens_per_s=58.9,
        step_s=395,
    ),
    PublishedRun(
        name="235B-A22B on policy, 256",
        model=LARGE,
        gpus=256,
        samples=512,
        mean=5713,
        longest=8192,
        server_tp=16,
        layout=WIDE,
        recompute="full",
        tokens_per_s=37.4,
        step_s=312,
    ),
    PublishedRun(
        name="235B-A22B one step off, 256",
        model=LARGE,
        gpus=256,
        sampling=128,
        samples=512,
        mean=5721,
        longest=8192,
        server_tp=8,
        layout={"tp": 4, "ep": 16, "pp": 8},
        recompute="full",
        tokens_per_s=58.7,
        step_s=231,
    ),
)
LEFT_OUT = {
    "marin#9250, OPD on 8 H100: 937 s a step": (
        "its own text says that lengths, checkpoints and validation differ, and that its FLOPs "
        "are those of tokens that were not counted"
    ),
    "marin#6218, Qwen3-32B teacher on 8 A100: 1,461 s a step": (
        "its lengths are not published, and its time goes into returning 128 log-probs a "
        "position, which no roofline has"
    ),
    "slime": "no throughput was found beside its model, lengths, batch and GPUs",
    "vime#327, vime#358": "no lengths, or no GPU of the catalogue",
    "StaleFlow, Laminar": "speed-ups without the times they are of",
    "NeMo-RL, DeepSeek V3 and Nemotron": "no description of the models is shipped here",
    "NeMo-RL on GB200": "no GPU of the catalogue",
}
"""Published speeds that are not compared, with the reason."""
