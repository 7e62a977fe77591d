"""Write docs/estimators.md: every estimator with its formula, bias and measured errors.

    python tools/estimator_table.py [--measure] [--check]

--measure evaluates every accepted estimator against the oracles of the tests, on one rank and on
two (about a minute), and records benchmarks/results/estimators.json first. --check exits 1 when the
page is not what code and record give, or when the record lacks an estimator.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated_page import write_or_check
from pydantic import ValidationError

from megatron_opd.config import estimator as rules_of
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.penalty import KlPenalty
from megatron_opd.losses.formulas import SYMBOLS, formula

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the oracles live with the tests
cases: Any = importlib.import_module("tests.support.loss_cases")
measured: Any = importlib.import_module("tests.support.loss_measurements")

PAGE = ROOT / "docs" / "estimators.md"
RECORD = ROOT / "benchmarks" / "results" / "estimators.json"


def shown(est: Estimator) -> dict[str, str]:
    """Formula lines by label; only the first of a label that several terms have."""
    lines: dict[str, str] = {}
    for label, text in formula(est):
        lines.setdefault(label, text)
    return lines


def power(error: float) -> str:
    """The power of ten that an error stays below."""
    return "0" if error == 0 else f"< 1e{math.floor(math.log10(error)) + 1}"


def bias_text(bias: float) -> str:
    """A relative bias, 0 where only rounding is left."""
    return "0" if bias < 1e-12 else f"{bias:.2g}"


def rounding(bias: float) -> str:
    """A bias, or where only rounding is left what it stays below."""
    return power(bias) if bias < 1e-12 else f"{bias:.2g}"


def cell(text: str) -> str:
    """Text inside a table."""
    return text.replace("|", "\\|")


def main_table(record: dict[str, Any]) -> list[str]:
    """One row per objective and support."""
    lines = [
        "| objective | support | bias of the gradient | measured | combinations | value error | "
        "gradient error | TP value error | TP gradient error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    biases = dict(measured.plains())
    order = [*measured.OPD, *measured.REWARD, "mixture"]
    rows = sorted(record["errors"].items(), key=lambda item: order.index(item[0].split()[0]))
    for name, row in rows:
        kind, support = name.split()
        known = name in biases
        said = shown(biases[name])["bias"] if known else "that of its terms"
        bias = bias_text(record["bias"][name]) if known else ""
        errors = [power(row[key]) for key in ("value", "gradient", "tp_value", "tp_gradient")]
        cells = [f"`{kind}`", f"`{support}`", cell(said), bias, str(row["combinations"]), *errors]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def variant_table(record: dict[str, Any]) -> list[str]:
    """Named choices, with what they bias."""
    lines = ["| choice | bias of the gradient | measured |", "|---|---|---|"]
    for tree, bias in zip(measured.VARIANTS, record["variant_bias"], strict=True):
        named = ", ".join(
            f"{section}.{key} {value}" for section in tree for key, value in flat(tree[section])
        )
        said = shown(cases.estimator(**tree))["bias"]
        lines.append(f"| `{named}` | {cell(said)} | {bias_text(bias)} |")
    return lines


def flat(section: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys of a section."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", x) for inner, x in flat(value))
        else:
            yield key, value


def formula_section() -> list[str]:
    """Every objective, in each of the forms its supports give it."""
    lines: list[str] = []
    skipped = {"cache", "loss", "symbols", "bias"}
    for kind in (*measured.OPD, *measured.REWARD):
        forms: dict[str, list[str]] = {}
        for support in measured.SUPPORTS:
            est = measured.plain(kind, support)
            if est is not None:
                parts = [f"- {a}: `{b}`" for a, b in formula(est) if a not in skipped | {"source"}]
                source = shown(est)["source"]
                forms.setdefault("\n".join([*parts, f"- source: {source}"]), []).append(
                    f"`{support['type']}`"
                )
        lines += ["", f"### `{kind}`", ""]
        for text, supports in forms.items():
            lines += [f"On {', '.join(supports)}:", "", text, ""]
    return lines


def ratio_section() -> list[str]:
    """Corrections and trust regions, as reverse KL reads them."""
    lines = ["| choice | ratio | correction |", "|---|---|---|"]
    for prox in (False, True):
        for kind in ("none", "importance", "truncated", "masked"):
            for level in ("token",) if kind == "none" else ("token", "sequence", "geometric"):
                chosen = {"type": kind, "prox": prox} | ({} if kind == "none" else {"level": level})
                text = shown(cases.estimator(support={"type": "path"}, correction=chosen))
                correction = text.get("correction", "1")
                named = f"{kind}, {level}, prox {str(prox).lower()}"
                lines.append(f"| {named} | `{text['ratio']}` | `{cell(correction)}` |")
    lines += ["", "| trust region | loss per token |", "|---|---|"]
    trusts: tuple[dict[str, Any], ...] = (
        {},
        {"type": "clip"},
        {"type": "clip", "dual": 3.0},
        {"type": "m2"},
        {"type": "m2", "moment": "capped"},
    )
    for trust in trusts:
        est = cases.estimator(support={"type": "path"}, objective={"trust": trust} if trust else {})
        named = ", ".join(f"{key} {value}" for key, value in trust.items()) or "none"
        lines.append(f"| {named} | `{cell(shown(est)['loss per token'])}` |")
    lines += ["", "| support | cache |", "|---|---|"]
    for support in measured.SUPPORTS:
        tree = {"support": {"type": support["type"]}, "objective": {"type": "forward_kl"}}
        lines.append(f"| `{support['type']}` | {shown(cases.estimator(**tree))['cache']} |")
    lines += ["", "| reduction | loss |", "|---|---|"]
    for kind in ("token_mean", "sequence_mean", "fixed_length"):
        lines.append(f"| `{kind}` | {shown(cases.estimator(reduction={'type': kind}))['loss']} |")
    return lines


def penalty_section(record: dict[str, Any]) -> list[str]:
    """Every (reference, direction, estimator) of a KL penalty: its term, or why there is none."""
    lines = [
        "`objective.kl` of the objectives from rewards. Tokens come from the sampler o at the "
        "prefixes that it visited, whatever `correction` is; measured: the largest "
        "|E[estimate] - divergence| by enumeration with p, o and q all different. `direction` null "
        "is reverse to the teacher, forward to the sampler. Proofs: `megatron_opd/losses/"
        "penalty.py`, `tests/unit/losses/test_penalty.py`.",
        "",
        "| to | direction | estimator | term | estimates | value bias | gradient bias |",
        "|---|---|---|---|---|---|---|",
    ]
    biases = {
        tuple(kl.values()): bias
        for kl, bias in zip(measured.PENALTIES, record["penalty_bias"], strict=True)
    }
    kinds = ("k1", "k2", "k3", "k3_unweighted")
    choices = itertools.product(("teacher", "sampler"), ("reverse", "forward"), kinds)
    for to, direction, kind in choices:
        tree = {"coefficient": 1, "to": to, "direction": direction, "estimator": kind}
        cells = [f"`{to}`", f"`{direction}`", f"`{kind}`"]
        try:
            kl = KlPenalty.model_validate(tree)
        except ValidationError as error:
            says = error.errors()[0]["msg"].removeprefix("Value error, ")
            lines.append(f"| {' | '.join(cells)} | refused | {cell(says)} | | |")
            continue
        bias = biases[to, direction, kind]
        cells += [f"`{kl.text().removeprefix('1 ')}`", cell(kl.estimates())]
        cells += [rounding(bias["value"]), rounding(bias["gradient"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def refused_section() -> list[str]:
    """How often each rule refuses, with the line a user sees for one combination."""
    examples: dict[int, str] = {}
    numbers: dict[str, int] = {}  # line -> rule
    counts: Counter[int] = Counter()
    total = 0
    for tree in cases.products():
        total += 1
        try:
            Estimator.model_validate(tree)
        except ValidationError as error:
            says = error.errors()[0]["msg"].removeprefix("Value error, ")
            if says not in numbers:
                numbers[says] = rule_of(tree, says)
            counts[numbers[says]] += 1
            examples.setdefault(numbers[says], says)
    lines = [
        f"Of {total} combinations of support, objective, trust region, penalty and correction "
        f"{total - sum(counts.values())} are accepted. The others are refused, each by the first "
        "rule it breaks; the line is that of one of them.",
        "",
        "| refused | line |",
        "|---|---|",
    ]
    lines += [f"| {counts[number]} | {cell(examples[number])} |" for number in sorted(counts)]
    return lines


def rule_of(tree: dict[str, Any], says: str) -> int:
    """Which rule speaks so."""
    loose = Estimator.model_construct(**sections(tree))
    return next(
        number
        for number, rule in enumerate(rules_of.RULES)
        for objective in loose.objectives
        if rule.broken(objective, loose) and rule.says(objective, loose) == says
    )


def sections(tree: dict[str, Any]) -> dict[str, Any]:
    """The sections of a refused combination, each valid on its own."""

    class Loose(Estimator):
        """Without the rules."""

        def _parts_are_compatible(self) -> Estimator:
            return self

    return dict(Loose.model_validate(tree))


MORE_SYMBOLS = (
    "A the advantage; rho a ratio of learner to sampler, kappa the factor made of it, r the ratio "
    "a trust region acts on; T tokens of a response, G responses of a group"
)
HEAD = """# Estimators

Generated by `python tools/estimator_table.py` from `megatron_opd/losses/formulas.py`, the rules of
`megatron_opd/config/estimator.py` and the figures of
[`benchmarks/results/estimators.json`](../benchmarks/results/estimators.json) (`--measure` takes
them anew). `opd check CONFIG.yaml` prints the formula that a run will use.

{symbols}

## Errors and bias

Value and gradient errors: the largest absolute difference to an independent float64 oracle
(`tests/support/loss_oracles.py`: loops, autograd, no project code), over every accepted combination
of correction, level, prox, trust region, penalty and reduction in turn. TP errors: the largest
relative difference of two tensor-parallel ranks to one, through gathered logits and through the
blockwise operation, of the loss and of the gradients of hidden states and LM head. Measured bias:
|E[g] - g| / |g| with E over every possible cache of a small problem (sampler, batch start, student
and teacher all differ) and g the exact gradient: of the divergence, or of the expected reward over
whole responses (groups of two, sum over tokens). The estimator of a row has its default correction
and trust region. All are held to limits by `tests/unit/losses/test_objective.py`,
`tests/unit/losses/test_biases.py` and `tests/dist/test_objectives.py`.
"""


def render(record: dict[str, Any]) -> str:
    """The whole page."""
    symbols = textwrap.fill(f"Symbols: {SYMBOLS}; {MORE_SYMBOLS}.", 100)
    lines = [HEAD.format(symbols=symbols), *main_table(record)]
    lines += ["", "## Choices and what they bias", "", *variant_table(record)]
    lines += ["", "## KL penalties", "", *penalty_section(record)]
    lines += ["", "## Formulas", *formula_section()]
    lines += ["## Ratios, trust regions, supports, reductions", "", *ratio_section()]
    lines += ["", "## Refused", "", *refused_section()]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def main() -> int:
    """Entry point."""
    if "--measure" in sys.argv:
        RECORD.write_text(json.dumps(measured.measure(), indent=2) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    counts = Counter(f"{est.objective.type} {est.support.type}" for est in cases.accepted())
    recorded = {name: row["combinations"] for name, row in record["errors"].items()}
    if recorded != dict(counts):
        print("the record lacks estimators: run python tools/estimator_table.py --measure")
        return 1
    return write_or_check(PAGE, render(record), sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
