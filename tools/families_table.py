"""Tables of docs/families.md: the record of `python -m checks families`, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_opd.inputs.served_rules import MEASURED, UNSERVED
from megatron_opd.models.families.table import FAMILIES
from tools.findings_table import Records

WAYS = ("prefill", "chunked prefill", "cached prefix", "decode")
STUDENTS = {
    "Phi3ForCausalLM": "Phi-3, Phi-4",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-MoE",
    "DeepseekV2ForCausalLM": "DeepSeek-V2-Lite",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, R1, Moonlight, Kimi-K2 text",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
}
"""Models of architectures that are accepted for their family of students alone, or some as teachers
only (Phi-4-mini, for its longrope)."""


def served_families(records: Records) -> str:
    """A row for each family: its errors by how they were computed, and the least change seen."""
    heads = ["family", "architecture", *WAYS, "a changed tensor shows"]
    rows = [
        [
            row["name"],
            f"`{row['architecture']}`",
            *(_nats(row["errors"][way]) for way in WAYS),
            _nats(row["least_seen_nats"]),
        ]
        for row in records("families")["served"]
    ]
    return _table(heads, rows)


def limited_families(records: Records) -> str:
    """A row for each family whose window or longrope SGLang does not compute."""
    heads = ["family", "architecture", "beyond", "within"]
    rows = [
        [row["name"], f"`{row['architecture']}`", *(_nats(row[f"nats_{k}"]) for k in heads[2:])]
        for row in records("families")["limited"]
    ]
    return _table(heads, rows)


def misserved_families(records: Records) -> str:
    """A row for each setting that SGLang serves as another model, and what refuses it."""
    rows = [
        [
            row["name"],
            "its server does not start" if row["nats"] is None else _nats(row["nats"]),
            row["refusal"].partition("config.json: ")[2].partition(", got")[0],
        ]
        for row in records("families")["misserved"]
    ]
    return _table(["setting", "nats", "refused"], rows)


def trained_families(records: Records) -> str:
    """A row for each family of students: how far the learner is from transformers, and learns."""
    heads = [
        "model_type",
        "logits",
        "a changed tensor shows",
        "update",
        "layouts",
        "their gap",
        "given experts",
        "divergence, nats",
        "not learning",
        "synced",
        "commit",
    ]
    synced = {row["name"]: row["nats"] for row in records("synced")["students"]}
    rows = [
        [
            f"`{row['name']}`",
            _nats(row["logits"]),
            _nats(row["least_seen"]),
            _nats(row["update"]),
            ", ".join(row["by_layout"]),
            _nats(row["layouts"]),
            "no experts" if row["replayed"] is None else _nats(row["replayed"]),
            " to ".join(f"{nats:.2f}" for nats in row["distil"]),
            " to ".join(f"{nats:.2f}" for nats in row["still"]),
            _nats(synced[row["name"]]),
            f"`{row['commit'][:8]}`",
        ]
        for row in records("students")["students"]
    ]
    return _table(heads, rows)


def refused_families(_: Records) -> str:
    """A row for each architecture that is refused whatever teacher.trust says."""
    return _table(["architecture", "why"], [[f"`{n}`", why] for n, why in UNSERVED.items()])


def trained_models(_: Records) -> str:
    """The models that students may be of."""
    trained = {family.architecture for family in FAMILIES.values()}
    served = {name: row.published for name, row in MEASURED.items() if name in trained}
    return ", ".join((served | STUDENTS).values())


def measured_models(_: Records) -> str:
    """The models that teachers may be of, in the order of the list."""
    return ", ".join(row.published for row in MEASURED.values())


def _nats(value: float) -> str:
    return f"{value:.1e}" if value < 0.01 else f"{value:.2g}"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


FUNCTIONS: Mapping[str, Callable[..., str]] = {
    each.__name__: each
    for each in (
        served_families,
        limited_families,
        misserved_families,
        trained_families,
        refused_families,
        trained_models,
        measured_models,
    )
}
"""By the names that the page calls them."""
