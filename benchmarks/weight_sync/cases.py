"""Which weight syncs are compared: sizes of the model, layouts, ways of sending."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.step import QWEN3_MOE_1_6B, TINY
from harness.case_rows import fingerprint_of

Tree = dict[str, Any]
MIB = 2**20
# SGLang chooses its model class by it
MOE = QWEN3_MOE_1_6B | {"architectures": ["Qwen3MoeForCausalLM"]}
FLIPPED = "model.layers.0.mlp.experts.0.down_proj.weight"


@dataclass(frozen=True)
class Size:
    """model: config.json. syncs, loaded: after the first, without and with requests in flight."""

    model: Tree
    bucket_bytes: int
    syncs: int
    loaded: int
    slots: int
    layouts: tuple[str, ...]
    ways: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """learner: learner.parallel. server: tp and ep of the one server."""

    learner: Tree
    server: Tree


LAYOUTS = {
    "tp2": Layout({"tp": 2}, {"tp": 2}),
    "tp2_ep2": Layout({"tp": 2, "ep": 2}, {"tp": 2, "ep": 2}),
    # of the tiny size: a server of one rank is up sooner
    "tp2_to_tp1": Layout({"tp": 2}, {"tp": 1}),
}
WAYS: dict[str, Tree] = {
    "shards": {"type": "shards"},
    "shards_same_host_off": {"type": "shards", "same_host": "off"},
    "shards_staged": {"type": "shards", "staging": True},
    "shards_staged_same_host_off": {"type": "shards", "staging": True, "same_host": "off"},
    "shards_staged_overlap": {"type": "shards", "staging": True, "overlap": True},
    "broadcast": {"type": "broadcast"},
}
"""Keys of weight_sync, by way."""

SIZES = {
    "full": Size(
        # 151 M parameters, 604 MB in float32
        MOE
        | {
            "vocab_size": 16_384,
            "hidden_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 1536,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 384,
            "max_position_embeddings": 2048,
        },
        bucket_bytes=64 * MIB,
        syncs=5,
        loaded=5,
        slots=8,
        layouts=("tp2", "tp2_ep2"),
        ways=tuple(WAYS),
    ),
    "tiny": Size(
        MOE
        | TINY
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "max_position_embeddings": 2048,
        },
        bucket_bytes=MIB // 8,
        syncs=2,
        loaded=1,
        slots=2,
        layouts=("tp2_to_tp1",),
        ways=("shards", "broadcast"),
    ),
}


@dataclass(frozen=True)
class Case:
    """One row of the result."""

    layout: str
    way: str
    size: Size

    @property
    def name(self) -> str:
        """Names its row."""
        return f"{self.layout}-{self.way}"

    def asked(self, model: Path, scratch: Path) -> Tree:
        """What case.py reads."""
        layout = LAYOUTS[self.layout]
        server = {
            "model": str(model),
            "dtype": "float32",
            "max_total_tokens": 8192,
            "max_running_requests": 32,
            "mem_fraction_static": 0.3,
            **layout.server,
        }
        config = {
            "data": {"train": "unused"},
            "student": server,
            "teacher": {"model": str(model)},
            "learner": {"dtype": "float32", "threads": 1, "parallel": layout.learner},
            "weight_sync": {"bucket_bytes": self.size.bucket_bytes, **WAYS[self.way]},
            "run": {"dir": str(scratch / "run")},
        }
        config["buffer"] = {"batch_size": 4}
        effort = {key: getattr(self.size, key) for key in ("syncs", "loaded", "slots")}
        return {"config": config, **effort, "flip": FLIPPED}

    def fingerprint(self) -> str:
        """Changes with the project's code, the benchmark's own, and what is asked."""
        return fingerprint_of(self.asked(Path(), Path()), "benchmarks/weight_sync")


def chosen_cases(size: Size) -> list[Case]:
    """Every way of every layout."""
    return [Case(layout, way, size) for layout in size.layouts for way in size.ways]
