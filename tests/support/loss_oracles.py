"""Every objective again, in float64, from the papers' equations: loops, autograd, no project code.

A loss is a pair of scalars (value, surrogate): the number reported, and the one whose gradient is
the estimator's gradient. They differ where a stop-gradient stands in the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from tests.support.loss_cases import Problem, Row

Pair = tuple[torch.Tensor, torch.Tensor]
ZERO = torch.zeros((), dtype=torch.float64)


def divergence_term(objective: Any, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """One action's share of the divergence, from probabilities."""
    kind = objective.type
    if kind in ("forward_kl", "skew_forward_kl") and float(q) == 0:
        return 0 * p
    if kind in ("reverse_kl", "sparse_reverse_kl"):
        return p * torch.log(p / q)
    if kind == "forward_kl":
        return q * torch.log(q / p)
    if kind == "jsd":
        m = objective.beta * q + (1 - objective.beta) * p
        first = objective.beta * q * torch.log(q / m)
        return first + (1 - objective.beta) * p * torch.log(p / m)
    if kind == "skew_forward_kl":
        return q * torch.log(q / (objective.alpha * q + (1 - objective.alpha) * p))
    assert kind == "skew_reverse_kl"
    return p * torch.log(p / (objective.alpha * p + (1 - objective.alpha) * q))


def rest(inside: torch.Tensor) -> torch.Tensor:
    """1 - inside; less than float32 can tell from none counts as that little, a constant."""
    left, least = 1 - inside, 2.0**-24
    return left if float(left.detach()) > least else torch.tensor(least, dtype=torch.float64)


def pull(objective: Any, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """-d divergence / d p of one action: the gradient is -sum p pull grad log p."""
    leaf = p.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(divergence_term(objective, leaf, q), leaf)
    return -slope


def exact_divergence(objective: Any, student_TV: torch.Tensor, case: Problem) -> torch.Tensor:
    """Of whole vocabularies, mean over tokens: what the estimators estimate."""
    total = ZERO
    for t in range(len(case.path)):
        p_V, q_V = torch.softmax(student_TV[t], 0), case.teacher_TV[t].exp()
        for p, q in zip(p_V, q_V, strict=True):
            total = total + divergence_term(objective, p, q)
    return total / len(case.path)


class Oracle:
    """One estimator on one cache."""

    def __init__(self, est: Any, case: Problem, rows: Sequence[Row], logits: torch.Tensor) -> None:
        self.est, self.case, self.rows = est, case, rows
        self.p = torch.log_softmax(logits, -1)  # differentiable
        self.read = set(range(len(case.lengths)))  # responses of the term at hand
        self.responses = [
            [t for t, b in enumerate(case.sample_T) if b == sample]
            for sample in range(len(case.lengths))
        ]

    def loss(self) -> Pair:
        """Reduced: what Evaluation.loss_sum / count is."""
        tokens: list[Pair] = [(ZERO, ZERO)] * len(self.case.path)
        counted: set[int] = set()
        for term in self.est.terms:
            weights = self.case.weights(term.objective)
            self.read = {b for b, weight in enumerate(weights) if weight > 0}
            counted |= self.read
            for t, (value, surrogate) in enumerate(self._tokens(term.objective)):
                if self.case.sample_T[t] in self.read:
                    c = term.coefficient * weights[self.case.sample_T[t]]
                    old_value, old_surrogate = tokens[t]
                    tokens[t] = old_value + c * value, old_surrogate + c * surrogate
        return self._reduced(tokens, 0, counted), self._reduced(tokens, 1, counted)

    def _reduced(self, tokens: list[Pair], which: int, counted: set[int]) -> torch.Tensor:
        kind, total = self.est.reduction.type, ZERO
        responses = max(len(counted), 1)
        num_tokens = max(sum(len(self.responses[b]) for b in counted), 1)
        for members in self.responses:
            own = sum((tokens[t][which] for t in members), ZERO)
            if kind == "token_mean":
                total = total + own / num_tokens
            elif kind == "sequence_mean":
                total = total + own / max(len(members), 1) / responses
            else:
                total = total + own / self.est.reduction.length / responses
        return total

    def _tokens(self, objective: Any) -> list[Pair]:
        table: dict[str, Callable[[Any], list[Pair]]] = {
            "reverse_kl": self._reverse_kl,
            "reinforce": self._token_reward,
            "ppo": self._token_reward,
            "grpo": self._token_reward,
            "gspo": self._gspo,
            "gepo": self._gepo,
            "sft_on_teacher": self._cross_entropy,
        }
        return table.get(objective.type, self._divergence)(objective)

    def _cross_entropy(self, objective: Any) -> list[Pair]:
        """Of the written ids, whatever the cache holds beside them."""
        terms = [-self.p[t, a] for t, a in enumerate(self.case.path)]
        return [(term, term) for term in terms]

    # --- ratios -----------------------------------------------------------------------------

    def _ratios(self, t: int, a: int) -> tuple[float, torch.Tensor]:
        """(kappa, r) of an action."""
        applied = self.est.applied_correction
        now = self.p[t, a]
        if applied.prox:
            upper, trust = self.case.prox_TV, torch.exp(now - self.case.prox_TV[t, a])
        else:
            upper, trust = self.p.detach(), torch.exp(now - now.detach())
        if applied.type == "none":
            return 1.0, trust
        if applied.type == "importance" and applied.level == "token" and not applied.prox:
            return 1.0, torch.exp(now - self.case.sampler_TV[t, a])
        if applied.level == "token":
            log_rho = float(upper[t, a] - self.case.sampler_TV[t, a])
        else:
            members = self.responses[self.case.sample_T[t]]
            logs = [float((upper - self.case.sampler_TV)[u, self.case.path[u]]) for u in members]
            log_rho = sum(logs) / (len(members) if applied.level == "geometric" else 1)
        rho = math.exp(log_rho)
        if applied.type == "truncated":
            rho = min(rho, applied.max_ratio)
        if applied.type == "masked" and not applied.min_ratio <= rho <= applied.max_ratio:
            rho = 0.0
        return rho, trust

    def _trusted(
        self, trust: Any, actions: list[tuple[torch.Tensor, float, float]]
    ) -> list[torch.Tensor]:
        """What is maximised of (r, A, weight) of every action of the mini-batch."""
        if trust.type == "none":
            return [r * A for r, A, _ in actions]
        if trust.type == "m2":
            return self._m2(trust, actions)
        out: list[torch.Tensor] = []
        for r, A, _ in actions:
            inside = torch.clamp(r, 1 - trust.low, 1 + trust.high)
            best = r * A if float(r * A) < float(inside * A) else inside * A
            if trust.dual is not None and A < 0 and float(best) < trust.dual * A:
                best = torch.tensor(trust.dual * A, dtype=torch.float64)
            out.append(best)
        return out

    def _m2(
        self, trust: Any, actions: list[tuple[torch.Tensor, float, float]]
    ) -> list[torch.Tensor]:
        """Mask one distance after another, the furthest first, until the mean is small enough."""

        def along(r: torch.Tensor, A: float) -> bool:
            return (float(r) > 1 and A > 0) or (float(r) < 1 and A < 0)

        moved = {i for i, (r, A, _) in enumerate(actions) if along(r, A)}
        kept = set(moved)

        def moment(i: int) -> float:
            return float(actions[i][0].detach().log()) ** 2

        def mean(members: set[int], cap: float) -> float:
            weight = sum(actions[i][2] for i in members)
            sums = sum(actions[i][2] * min(moment(i), cap) for i in members)
            return sums / weight if members else 0.0

        if trust.moment == "capped":  # the furthest that all may be cut to, and itself
            cap = math.inf
            while mean(moved, cap) > trust.threshold:
                lower = [moment(i) for i in moved if moment(i) < cap]
                cap = max(lower, default=0.0)
            kept = {i for i in moved if moment(i) < cap}
        while trust.moment == "kept" and mean(kept, math.inf) > trust.threshold:
            furthest = max(moment(i) for i in kept)
            kept = {i for i in kept if moment(i) != furthest}
        low, high = 1 - (trust.least_low or 0), 1 + (trust.least_high or 0)
        kept |= {i for i in moved if low <= float(actions[i][0]) <= high}
        return [ZERO if i in moved - kept else r * A for i, (r, A, _) in enumerate(actions)]

    # --- distillation -----------------------------------------------------------------------

    def _scored(self) -> list[tuple[int, int, float]]:
        """(token, id, weight) of what the support selected and the teacher gave a finite score."""
        return [
            (t, a, w)
            for t, row in enumerate(self.rows)
            for a, w in row.items()
            if w > 0 and math.isfinite(self.case.teacher_TV[t, a])
            if self.case.sample_T[t] in self.read
        ]

    def _sum(self, places: list[int], terms: list[Pair]) -> list[Pair]:
        tokens: list[Pair] = [(ZERO, ZERO)] * len(self.case.path)
        for t, (value, surrogate) in zip(places, terms, strict=True):
            tokens[t] = tokens[t][0] + value, tokens[t][1] + surrogate
        return tokens

    def _reverse_kl(self, objective: Any) -> list[Pair]:
        """AsyncOPD Eq. 4-7, 15; renormalised: the same of the distributions of Eq. 9."""
        if objective.outside == "renormalise":
            rest_dropped = objective.model_copy(update={"outside": "drop"})
            return self._restricted_to_sets()._reverse_kl(rest_dropped)
        scored, actions, kappas = self._scored(), [], []
        for t, a, w in scored:
            base = self.p if objective.advantage == "current" else self.case.sampler_TV
            kappa, r = self._ratios(t, a)
            actions.append((r, float(self.case.teacher_TV[t, a] - base[t, a].detach()), w))
            kappas.append(kappa)
        best = self._trusted(objective.trust, actions)
        terms = [
            (-w * kappa * b, -w * kappa * b)
            for (_, _, w), kappa, b in zip(scored, kappas, best, strict=True)
        ]
        return self._sum([t for t, _, _ in scored], terms)

    def _restricted_to_sets(self) -> Oracle:
        """The same estimator where every distribution lives on its row's set alone."""
        other = copy(self)
        members: list[list[int]] = [[] for _ in self.rows]
        for t, a, _ in self._scored():
            members[t].append(a)

        def restricted(logp_TV: torch.Tensor) -> torch.Tensor:
            rows = []
            for t, inside in enumerate(members):
                mass = sum((torch.exp(logp_TV[t, a]) for a in inside), ZERO)
                rows.append(logp_TV[t] - torch.log(mass) if inside else logp_TV[t])
            return torch.stack(rows)

        other.p = restricted(self.p)
        other.case = replace(
            self.case,
            prox_TV=restricted(self.case.prox_TV),
            sampler_TV=restricted(self.case.sampler_TV),
            teacher_TV=restricted(self.case.teacher_TV),
        )
        other.rows = [
            {a: w / sum(row[b] for b in inside) for a, w in row.items() if a in inside}
            for row, inside in zip(self.rows, members, strict=True)
        ]
        return other

    def _divergence(self, objective: Any) -> list[Pair]:
        support = self.est.support
        if support.type in ("topk", "teacher_topk", "exact"):
            return [self._on_set(objective, t) for t in range(len(self.rows))]
        scored, terms = self._scored(), []
        # AsyncOPD Eq. 3 drops a constant from the pull; so does every divergence whose pull is not
        # 0 at p = q
        one = torch.ones((), dtype=torch.float64)
        at_goal = float(pull(objective, one, one))
        for t, a, w in scored:
            p, q = torch.exp(self.p[t, a]), torch.exp(self.case.teacher_TV[t, a])
            share = float(divergence_term(objective, p, q))
            drive = float(pull(objective, p, q))
            if support.owner == "teacher":
                value = w * share / float(q)
                surrogate = -w * float(p / q) * drive * self.p[t, a]
            else:
                kappa, r = self._ratios(t, a)
                value = w * kappa * float(r) * share / float(p)
                surrogate = -w * kappa * float(r) * (drive - at_goal) * self.p[t, a]
            terms.append((torch.tensor(value, dtype=torch.float64), surrogate))
        return self._sum([t for t, _, _ in scored], terms)

    def _on_set(self, objective: Any, t: int) -> Pair:
        """AsyncOPD Eq. 8-10 and its variants; plain autograd through the student."""
        members = [a for u, a, _ in self._scored() if u == t]
        p = [torch.exp(self.p[t, a]) for a in members]
        q = [torch.exp(self.case.teacher_TV[t, a]) for a in members]
        outside = objective.outside or "renormalise"
        if self.est.support.type != "exact":
            inside_p, inside_q = sum(p, ZERO), sum(q, ZERO)
            if outside == "renormalise":
                p, q = [x / inside_p for x in p], [x / inside_q for x in q]
            elif outside == "bucket":
                p, q = [*p, rest(inside_p)], [*q, rest(inside_q)]
        total = ZERO
        for x, y in zip(p, q, strict=True):
            total = total + divergence_term(objective, x, y)
        return total, total

    # --- rewards ----------------------------------------------------------------------------

    def _advantage(self, kind: str, t: int) -> float:
        """Of the token's response, or of its turn among those at the same position."""
        b, size = self.case.sample_T[t], self.case.group_size
        members = range(b // size * size, b // size * size + size)
        own, group = self.case.rewards[b], [self.case.rewards[i] for i in members]
        if self.est.credit == "turn":
            turns, left = self.case.turns, self.responses[b].index(t)
            turn = 0
            while left >= turns[b][turn][0]:
                left -= turns[b][turn][0]
                turn += 1
            there = [turns[i][turn][1] for i in members if turn < len(turns[i])]
            group = [reward for reward in there if reward is not None]
            if turns[b][turn][1] is None or (len(group) == 1 and kind != "reward"):
                return 0.0
            own = turns[b][turn][1]
        mean = sum(group) / len(group)
        if kind == "reward":
            return own
        if kind == "group_mean":
            return own - mean
        if kind == "leave_one_out":
            return own - (sum(group) - own) / (len(group) - 1)
        divisor = {"group_std": len(group) - 1, "group_std_population": len(group)}[kind]
        return (own - mean) / (math.sqrt(sum((r - mean) ** 2 for r in group) / divisor) + 1e-6)

    def _penalised(self, objective: Any, tokens: list[Pair]) -> list[Pair]:
        if objective.kl is None:
            return tokens
        out: list[Pair] = []
        for t, (value, surrogate) in enumerate(tokens):
            a = self.case.path[t]
            reference_TV = {"teacher": self.case.teacher_TV, "sampler": self.case.sampler_TV}
            reference = reference_TV[objective.kl.to][t, a]
            if not math.isfinite(reference):
                out.append((value, surrogate))
                continue
            p, f = torch.exp(self.p[t, a]), torch.exp(reference)
            rho = p / torch.exp(self.case.sampler_TV[t, a])
            more, pulled = self._penalty(objective.kl, p, f, rho)
            c = objective.kl.coefficient
            out.append((value + c * more, surrogate + c * pulled))
        return out

    def _penalty(self, kl: Any, p: torch.Tensor, f: torch.Tensor, rho: torch.Tensor) -> Pair:
        """Differentiated as they stand, but for k2, whose value is k3's. f: the reference."""
        if kl.estimator == "k3_unweighted":
            k3 = f / p - 1 + torch.log(p / f)
            return k3, k3
        direction = kl.direction or {"teacher": "reverse", "sampler": "forward"}[kl.to]
        if direction == "forward":
            k1, k3 = torch.log(f / p), p / f - 1 - torch.log(p / f)
            return {"k1": (k1, k1), "k3": (k3, k3)}[kl.estimator]
        k1, k3 = rho * torch.log(p / f), rho * (f / p - 1 + torch.log(p / f))
        k2 = rho.detach() * torch.log(p / f) ** 2 / 2
        return {"k1": (k1, k1), "k2": (k3, k2), "k3": (k3, k3)}[kl.estimator]

    def _token_reward(self, objective: Any) -> list[Pair]:
        """GEPO Eq. 5-6, 8."""
        actions, kappas = [], []
        read = [t for t, b in enumerate(self.case.sample_T) if b in self.read]
        for t in read:
            kappa, r = self._ratios(t, self.case.path[t])
            actions.append((r, self._advantage(objective.advantage, t), 1.0))
            kappas.append(kappa)
        best = self._trusted(objective.trust, actions)
        tokens: list[Pair] = [(ZERO, ZERO)] * len(self.case.path)
        for t, k, b in zip(read, kappas, best, strict=True):
            tokens[t] = -k * b, -k * b
        return self._penalised(objective, tokens)

    def _gspo(self, objective: Any) -> list[Pair]:
        """GEPO Eq. 7, 9-10: the geometric mean of p / q, clipped as one."""
        tokens: list[Pair] = [(ZERO, ZERO)] * len(self.case.path)
        for members in self.responses:
            if not members:
                continue
            product = torch.ones((), dtype=torch.float64)
            for t in members:
                product = product * self._ratios(t, self.case.path[t])[1]
            s = product ** (1 / len(members))
            for t, best in zip(members, self._by_token(objective, members, s), strict=True):
                kappa = self._ratios(t, self.case.path[t])[0]
                tokens[t] = -kappa * best, -kappa * best
        return self._penalised(objective, tokens)

    def _gepo(self, objective: Any) -> list[Pair]:
        """GEPO Eq. 9, 11, 12, 15, with probabilities and not their logarithms."""
        size, tokens = self.case.group_size, [(ZERO, ZERO)] * len(self.case.path)

        def geometric(logp_TV: torch.Tensor, b: int) -> torch.Tensor:
            product = torch.ones((), dtype=torch.float64)
            for t in self.responses[b]:
                product = product * torch.exp(logp_TV[t, self.case.path[t]])
            return product ** (1 / max(len(self.responses[b]), 1))

        for b, members in enumerate(self.responses):
            group = range(b // size * size, b // size * size + size)
            q = [float(geometric(self.case.sampler_TV, i)) for i in group]
            expected = sum(x * x for x in q) / sum(q)
            mean = sum(q) / len(q)
            eps = min(1.0, objective.defensive * sum((x - mean) ** 2 for x in q) / len(q))
            p = geometric(self.p, b)
            weight = p / (eps * p.detach() + (1 - eps) * expected)
            for t, best in zip(members, self._by_token(objective, members, weight), strict=True):
                tokens[t] = -best, -best
        return self._penalised(objective, tokens)

    def _by_token(
        self, objective: Any, members: list[int], ratio: torch.Tensor
    ) -> list[torch.Tensor]:
        """What is maximised of each token of a response whose one ratio this is.

        With advantages of turns GSPO-token: sg(ratio) p_t / sg(p_t) in its place.
        """
        found: list[torch.Tensor] = []
        for t in members:
            r = ratio
            if self.est.credit == "turn":
                p = torch.exp(self.p[t, self.case.path[t]])
                r = ratio.detach() * p / p.detach()
            A = self._advantage(objective.advantage, t)
            found += self._trusted(objective.trust, [(r, A, 1.0)])
        return found


def oracle(est: Any, case: Problem, rows: Sequence[Row]) -> tuple[float, torch.Tensor]:
    """(loss, its gradient with respect to the student's logits [T, V])."""
    logits = case.student_TV.detach().clone().requires_grad_()
    value, surrogate = Oracle(est, case, rows, logits).loss()
    if not surrogate.requires_grad:
        return float(value), torch.zeros_like(logits)
    (gradient,) = torch.autograd.grad(surrogate, logits)
    return float(value.detach()), gradient


def exact(objective: Any, case: Problem) -> tuple[float, torch.Tensor]:
    """The divergence itself and its gradient, the whole vocabulary enumerated."""
    logits = case.student_TV.detach().clone().requires_grad_()
    value = exact_divergence(objective, logits, case)
    (gradient,) = torch.autograd.grad(value, logits)
    return float(value.detach()), gradient
