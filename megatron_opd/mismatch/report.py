"""Turns what `opd mismatch` measured into one tree for JSON, and that into tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from megatron_opd.config.schema import Config
from megatron_opd.metrics.summary import commit, versions
from megatron_opd.mismatch.measure import FREE, GATED, REPLAYED, MeasuredMismatch
from megatron_opd.mismatch.options import Options
from megatron_opd.models.spec import ModelSpec
from megatron_opd.output import new_table
from megatron_opd.records.types import Prompt
from megatron_opd.sizing.matching import Served, by_layout, compared

Tree = dict[str, Any]
NAMES = {
    "decode_learner": "decode, learner",
    "prefill_learner": "prefill, learner",
    "decode_prefill": "decode, prefill",
    "decode_learner_free": "decode, no replay",
    "decode_learner_replayed": "decode, with replay",
    "decode_learner_replayed_gates": "decode, with gates",
}
"""Names the two sides of each comparison: decode and prefill are the sampler's."""
HEADLINE = "decode_learner"
ROUTED = {FREE: "free", REPLAYED: "replayed", GATED: "replayed with gate weights"}
"""Says how the learner routes when it trains."""
CHOICES = {
    "free": "without replay",
    "replayed": "with replay",
    "replayed_gates": "with replayed gates",
}


def figures_of(
    config: Config,
    spec: ModelSpec,
    prompts: Sequence[Prompt],
    measured: MeasuredMismatch,
    options: Options,
    served: Sequence[Served] = (),
) -> Tree:
    """Return all figures. responses: by response, in order, with what each comparison found.

    served: servers started elsewhere, by their own words.
    """
    learner, student = config.learner, config.student
    found = measured.comparisons(options.edges, options.threshold)
    layouts = by_layout(served) or {
        Served(student.tp, student.ep, student.dtype): len(student.urls) or student.servers
    }
    sampler, *others = (
        {"dtype": each.dtype, "tp": each.tp, "ep": each.ep, "servers": servers}
        for each, servers in layouts.items()
    )
    rows = [row for each in layouts for row in compared(config, spec, each)]
    return {
        "commit": commit(),
        "versions": dict(versions()),
        "model": str(student.model),
        "learner": {"dtype": learner.dtype, "logp": learner.logp}
        | {"parallel": learner.parallel.model_dump(mode="json")},
        "sampler": sampler | ({"other_layouts": others} if others else {}),
        "differences": list(dict.fromkeys(row.text for row in rows if row.differs)),
        "deterministic": config.run.deterministic,
        "seed": config.run.seed,
        "temperature": config.rollout.temperature,
        "max_new_tokens": config.rollout.max_new_tokens,
        "threshold": options.threshold,
        "prompts": len(prompts),
        "rejected": measured.rejected,
        "learner_routing": ROUTED[measured.trained],
        "routing": None if measured.routing is None else measured.routing.as_dict(),
        "comparisons": {name: each.as_dict() for name, each in found.items()},
        "responses": [
            {
                "prompt": rollout.prompt.uid,
                "tokens": rollout.num_response_tokens,
                "finish_reason": rollout.finish_reason,
                "engine": rollout.engine,
            }
            for rollout in measured.rollouts
        ],
    }


def tables(figures: Tree) -> list[Table]:
    """Return what the terminal shows: all comparisons, the headline's buckets, routing."""
    found: Tree = figures["comparisons"]
    result = [_overview(figures, found), _buckets(found[HEADLINE])]
    if figures["routing"] is not None:
        result.append(_routing(figures))
    return result


def _overview(figures: Tree, found: Mapping[str, Tree]) -> Table:
    gap = found[HEADLINE]["gap"]
    threshold = figures["threshold"]
    table = new_table(
        f"{gap['tokens']} tokens of {gap['responses']} responses: the largest |p - q| of a "
        f"response (median, p90, max), the mean, k1 and k3 in nats, the share above {threshold:g}",
        ("p, q", "median", "p90", "max", "mean", "k1", "k3", "above"),
    )
    for name, each in found.items():
        gap = each["gap"]
        table.add_row(
            NAMES[name],
            *(_small(gap["max_dp"][key]) for key in ("median", "p90", "max")),
            _small(gap["token_mean_dp"]),
            _small(gap["k1_nats"]),
            _small(gap["k3_nats"]),
            f"{100 * gap['above']:.2g} %",
        )
    lines = [f"the learner routes {figures['learner_routing']}"] if figures["routing"] else []
    lines += [f"differs: {line}" for line in figures["differences"]]
    if figures["rejected"]:
        lines.append(f"{figures['rejected']} prompts got no response")
    table.caption = "\n".join(lines) or None
    return table


def _buckets(headline: Tree) -> Table:
    table = new_table(
        f"{NAMES[HEADLINE]}: the same by length of response",
        ("tokens", "responses", "median", "p90", "max", "mean", "k3"),
    )
    for bucket in headline["by_length"]:
        gap = bucket["gap"]
        span = f"{bucket['first']}-{bucket['last']}"
        if gap is None:
            table.add_row(span, "0", *("-",) * 5)
            continue
        table.add_row(
            span,
            str(gap["responses"]),
            *(_small(gap["max_dp"][key]) for key in ("median", "p90", "max")),
            _small(gap["token_mean_dp"]),
            _small(gap["k3_nats"]),
        )
    return table


def _routing(figures: Tree) -> Table:
    routing = figures["routing"]
    table = new_table(
        "experts that the learner would choose otherwise than the sampler did",
        ("learner", "choices", "differ", "share"),
    )
    for kind, name in CHOICES.items():
        if f"differ_{kind}" not in routing:
            continue
        differ, share = routing[f"differ_{kind}"], routing[f"differ_{kind}_fraction"]
        table.add_row(name, str(routing["choices"]), str(differ), f"{100 * share:.3g} %")
    return table


def _small(value: float) -> str:
    return f"{value:.1e}"
