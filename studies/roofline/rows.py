"""Holds published speeds whose settings are published too, and says why others are left out.

NeMo-RL's page "Performance", release 0.6, H100 BF16 (docs/about/performance-summary.md of
NVIDIA-NeMo/RL at 7ea279ab; recipes in examples/configs/recipes/llm/performance): GRPO on
OpenMathInstruct-2, Megatron-Core and vLLM, averages of five steps. The page has sizes of model,
batch, lengths and layouts. Which GPUs sample and which train, and what is recomputed, is in the
recipes. Tokens are those of prompts and responses.

One phase alone: NeMo AutoModel's page (docs/performance-summary.md of NVIDIA-NeMo/Automodel,
2025-10-02) has a pre-training step with balanced routing, NVIDIA-NeMo/RL#2808 has weight syncs on
DGX H100; of its rows those whose layout says how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """Describes a published run.

    samples, mini_batches: of a step. mean: tokens of a sample with its prompt; no sample has more
    than `longest`. gpus: all. sampling: those that sample while the others train; 0: all of them
    do both, in turn. ahead: steps whose samples may be in flight while others train. server_tp:
    GPUs of a server. layout: of the learner, without dp.
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
    ahead: int = 1
    recompute: str = "none"

    @property
    def samplers(self) -> int:
        """Returns the GPUs that sample."""
        return self.sampling or self.gpus

    @property
    def trainers(self) -> int:
        """Returns the GPUs that train."""
        return self.gpus - self.sampling


@dataclass(frozen=True, slots=True)
class PublishedTraining:
    """Describes published training of whole sequences of `tokens` tokens, of a step of `samples`.

    micro_samples: of a micro-batch. tokens_per_s, tflops: for each GPU, as published.
    """

    name: str
    model: str
    gpus: int
    samples: int
    micro_samples: int
    tokens: int
    layout: dict[str, int]
    tokens_per_s: float
    tflops: float


@dataclass(frozen=True, slots=True)
class PublishedSync:
    """Describes a published weight sync. layout: of the learner. seconds: shortest and longest.

    ends: layers of the first and the last of its stages; 0: as many as in the others.
    """

    name: str
    model: str
    layout: dict[str, int]
    server_tp: int
    servers: int
    seconds: tuple[float, float]
    ends: int = 0


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
        ahead=8,
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
TRAINING = PublishedTraining(
    name="30B-A3B pre-training, 8",
    model=SMALL,
    gpus=8,
    samples=512,
    micro_samples=4,
    tokens=4096,
    layout={"dp": 8, "ep": 8},
    tokens_per_s=12_040,
    tflops=277,
)
SYNCS = (
    PublishedSync(
        "30B-A3B, EP8 PP2 to 8 of TP2", SMALL, {"dp": 8, "ep": 8, "pp": 2}, 2, 8, (0.51, 0.55)
    ),
    PublishedSync(
        "30B-A3B, EP8 PP2 to 2 of TP8", SMALL, {"dp": 8, "ep": 8, "pp": 2}, 8, 2, (0.50, 0.51)
    ),
    PublishedSync(
        "235B-A22B, TP4 PP8 EP16 to 16 of TP8",
        LARGE,
        {"tp": 4, "dp": 4, "pp": 8, "ep": 16},
        8,
        16,
        (4.56, 4.85),
        ends=11,
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
    "slime": "no speed of a step is at hand with its model, lengths, batch and GPUs",
    "vime#327, vime#358": "no lengths, or no GPU of the catalogue",
    "StaleFlow, Laminar": "speed-ups without the times they are of",
    "NeMo-RL, DeepSeek V3 and Nemotron": "no description of the models is shipped here",
    "NeMo-RL on GB200": "no GPU of the catalogue",
}
"""Published speeds that are not compared, with the reason."""
