"""Write the formula of an estimator as plain text, as the code computes it. Torch-free.

Symbols as everywhere: p the student now, o the sampler, q the teacher, p0 the student at the
batch's start (prox), sg stop-gradient, k a cached action of token t, w its weight in the cache, A
the advantage, rho a ratio of learner to sampler, kappa the factor made of it, r the ratio a trust
region acts on. Lower-case probabilities are of the next token. Each part of the configuration says
its own lines.
"""

from __future__ import annotations

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.trust import Line
from megatron_opd.losses.biases import bias_of, sources_of

SYMBOLS = (
    "p student now, o sampler, q teacher, p0 student at the batch's start; k cached action of "
    "token t, w its weight; sg stop-gradient"
)


def formula(estimator: Estimator) -> list[Line]:
    """Returns label and text of every part of the loss, in the order in which it is computed."""
    lines: list[Line] = []
    terms = estimator.terms
    if len(terms) > 1:
        total = " + ".join(f"{term.coefficient:g} L{i}" for i, term in enumerate(terms, 1))
        lines.append(("loss per token", f"L = {total}"))
    for number, term in enumerate(terms, 1):
        objective = term.objective
        prefix = f"L{number}, {objective.type}: " if len(terms) > 1 else ""
        part = objective.formula(estimator.use)
        if len(terms) == 1 and term.coefficient != 1:
            part.append(("coefficient", f"{term.coefficient:g}"))
        part.append(("bias", bias_of(objective, estimator)))
        part.append(("source", sources_of(objective, estimator)))
        lines += [(prefix + label, text) for label, text in part]
    lines.append(("cache", estimator.support.text()))
    lines.append(("loss", estimator.reduction.text()))
    lines.append(("symbols", SYMBOLS))
    return lines
