"""Small made-up problems, caches of every support, and every estimator that config accepts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from megatron_opd.batching.advantages import columns_of
from megatron_opd.batching.turn_advantages import advantages_by_position
from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.vocab_parallel import gather_logp
from megatron_opd.records.columns import GroupColumns
from sglang_bridge.columns import dtypes

Row = dict[int, float]
"""What one token caches: id -> weight."""


@dataclass(frozen=True)
class Problem:
    """Responses of these lengths, in groups of two, over a tiny vocabulary.

    student_TV: logits. The others are log-probs. path: the sampled id of every token.
    reward_weights, teacher_weights: by response; empty: all 1. imitation_weights: empty: all 0, as
    the student wrote all. turns: by response, the tokens of each of its turns and their own reward,
    if any; read with credit: turn alone.
    """

    lengths: tuple[int, ...]
    student_TV: torch.Tensor
    prox_TV: torch.Tensor
    sampler_TV: torch.Tensor
    teacher_TV: torch.Tensor
    path: tuple[int, ...]
    rewards: tuple[float, ...]
    group_size: int = 2
    reward_weights: tuple[float, ...] = ()
    teacher_weights: tuple[float, ...] = ()
    imitation_weights: tuple[float, ...] = ()
    turns: tuple[tuple[tuple[int, float | None], ...], ...] = ()

    def weights(self, objective: Any) -> tuple[float, ...]:
        """What a term of this objective is multiplied with on each response."""
        if objective.imitates:
            return self.imitation_weights or (0.0,) * len(self.lengths)
        chosen = self.reward_weights if objective.reads_reward else self.teacher_weights
        return chosen or (1.0,) * len(self.lengths)

    @property
    def sample_T(self) -> list[int]:
        return [b for b, length in enumerate(self.lengths) for _ in range(length)]

    @property
    def vocab(self) -> int:
        return self.student_TV.shape[1]


def problem(
    seed: int = 0, lengths: tuple[int, ...] = (2, 1, 0, 3), vocab: int = 4, spread: float = 0.7
) -> Problem:
    """Student, prox, sampler and teacher differ by about `spread` nats."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    shape = sum(lengths), vocab

    def normal() -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    base = normal()
    student, prox, sampler, teacher = (base + spread * normal() for _ in range(4))
    sampler, prox, teacher = (torch.log_softmax(x, -1) for x in (sampler, prox, teacher))
    path = tuple(int(rng.choice(vocab, p=row.exp().numpy())) for row in sampler)
    rewards = tuple(float(r) for r in rng.normal(size=len(lengths)))
    turns = tuple(_turns(length, rng) for length in lengths)
    return Problem(lengths, student, prox, sampler, teacher, path, rewards, turns=turns)


def _turns(length: int, rng: np.random.Generator) -> tuple[tuple[int, float | None], ...]:
    """Turns of one or two tokens; about every fourth has no reward."""
    found: list[tuple[int, float | None]] = []
    while length:
        tokens = int(rng.integers(1, min(length, 2) + 1))
        reward = float(rng.normal()) if rng.random() < 0.75 else None
        found.append((tokens, reward))
        length -= tokens
    return tuple(found)


def draw_rows(support: Any, case: Problem, rng: np.random.Generator) -> list[Row]:
    """A cache of this support, made of its definition in plain Python."""
    rows: list[Row] = []
    for t, path in enumerate(case.path):
        owner_TV = case.teacher_TV if support.owner == "teacher" else case.sampler_TV
        probs = owner_TV[t].exp().tolist()
        if support.type == "path":
            rows.append({path: 1.0})
            continue
        ranked = sorted(range(len(probs)), key=lambda a: -probs[a])
        atoms = ranked[: support.num_atoms(len(probs))]
        row = {a: probs[a] for a in atoms}
        rest = [a for a in ranked if a not in row]
        mass = sum(probs[a] for a in rest)
        if support.num_draws and rest:
            drawn = rng.choice(rest, size=support.num_draws, p=[probs[a] / mass for a in rest])
            counts = Counter(int(a) for a in drawn)
            row |= {a: n * mass / support.num_draws for a, n in counts.items()}
        rows.append({path: 0.0} | row)
    return rows


def flat(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """row_N, id_N, weight_N; ids rise inside a row."""
    triples = [(t, a, w) for t, row in enumerate(rows) for a, w in sorted(row.items())]
    row_N, id_N, weight_N = zip(*triples, strict=True) if triples else ((), (), ())
    return (
        torch.tensor(row_N, dtype=torch.int64),
        torch.tensor(id_N, dtype=torch.int64),
        torch.tensor(weight_N, dtype=torch.float64),
    )


def ungrouped_cache(num_samples: int, **columns: Any) -> Cache:
    """A cache of responses whose group columns are 0, but for those that are named."""
    zero_B = torch.zeros(num_samples, dtype=torch.float64)
    groups = dict.fromkeys(dtypes(GroupColumns), zero_B)
    weights = dict.fromkeys(
        ("reward_weight_B", "teacher_weight_B", "share_B"), torch.ones_like(zero_B)
    )
    return Cache(**(groups | weights | columns))


def cache_of(est: Estimator, case: Problem, rows: list[Row], student_N: torch.Tensor) -> Cache:
    """What the learner hands to the loss; group columns are the project's own."""
    row_N, id_N, weight_N = flat(rows)
    sampler_N = case.sampler_TV[row_N, id_N].clone()
    on_path = id_N == torch.tensor(case.path, dtype=torch.int64)[row_N]
    if est.support.owner == "teacher":
        sampler_N[~on_path] = torch.nan
    teacher_N = case.teacher_TV[row_N, id_N]
    asked = [False] * len(case.lengths)
    for objective in est.objectives:
        if objective.reads_teacher:
            asked = [a or w > 0 for a, w in zip(asked, case.weights(objective), strict=True)]
    asked_N = torch.tensor([asked[case.sample_T[t]] for t in row_N.tolist()], dtype=torch.bool)
    teacher_N = teacher_N.masked_fill(~asked_N, torch.nan)
    sample = np.array(case.sample_T, dtype=np.int64)
    path_logp = case.sampler_TV[range(len(case.path)), case.path].numpy()
    logq_B = np.array(
        [path_logp[sample == b].mean() if n else 0.0 for b, n in enumerate(case.lengths)]
    )
    columns = columns_of(
        est, np.array(case.rewards), logq_B, np.arange(len(case.lengths)) // case.group_size
    )
    return Cache(
        student_logp_N=student_N,
        sampler_logp_N=sampler_N,
        teacher_logp_N=teacher_N,
        weight_N=weight_N,
        row_N=row_N,
        path_T=on_path.nonzero()[:, 0],
        sample_T=torch.tensor(sample),
        prox_logp_N=case.prox_TV[row_N, id_N] if est.applied_correction.prox else None,
        advantage_B=torch.tensor(columns.advantage_B),
        group_log_q_B=torch.tensor(columns.group_log_q_B),
        defensive_B=torch.tensor(columns.defensive_B),
        reward_weight_B=_weights(case.reward_weights, case),
        teacher_weight_B=_weights(case.teacher_weights, case),
        imitation_weight_B=_weights(case.imitation_weights or (0.0,) * len(case.lengths), case),
        share_B=torch.tensor(columns.share_B),
        turn_advantage_T=_turn_advantages(est, case) if est.credit == "turn" else None,
    )


def _turn_advantages(est: Estimator, case: Problem) -> torch.Tensor:
    """Of the project's own function, by token."""
    kind = next(o.reward_advantage for o in est.objectives if o.reward_advantage is not None)
    runs = [
        (b // case.group_size, turn, tokens, np.nan if reward is None else reward)
        for b, turns in enumerate(case.turns)
        for turn, (tokens, reward) in enumerate(turns)
    ]
    group_R, turn_R, tokens_R, reward_R = (np.array(column) for column in zip(*runs, strict=True))
    advantage_R = advantages_by_position(kind, reward_R, group_R, turn_R)
    return torch.tensor(np.repeat(advantage_R, tokens_R))


def _weights(given: tuple[float, ...], case: Problem) -> torch.Tensor:
    return torch.tensor(given or (1.0,) * len(case.lengths), dtype=torch.float64)


def student_logp(logits_TV: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    row_N, id_N, _ = flat(rows)
    return gather_logp(logits_TV, row_N, id_N)


# Every value of every key that changes which code runs; numbers are chosen so that each acts.
TRUSTS: list[dict[str, Any]] = [
    {"type": "none"},
    {"type": "clip", "low": 0.1, "high": 0.2},
    {"type": "clip", "low": 0.1, "high": 0.2, "dual": 1.1},
    {"type": "m2", "threshold": 0.1},
    {"type": "m2", "threshold": 0.1, "moment": "capped"},
]
OUTSIDES: list[dict[str, Any]] = [
    {},
    {"outside": "renormalise"},
    {"outside": "bucket"},
    {"outside": "drop"},
]
PENALTIES: list[dict[str, Any]] = [
    {"trust": {"type": "none"}, "kl": {"coefficient": 0.3}},
    {"kl": {"coefficient": 0.3, "estimator": "k2"}, "advantage": "group_std_population"},
    {"kl": {"coefficient": 0.3, "to": "sampler"}},
    {"kl": {"coefficient": 0.3, "to": "sampler", "estimator": "k1"}},
    {"kl": {"coefficient": 0.3, "to": "sampler", "direction": "reverse", "estimator": "k1"}},
    {"kl": {"coefficient": 0.3, "to": "sampler", "estimator": "k3_unweighted"}},
]
OBJECTIVES: list[dict[str, Any]] = [
    *(
        {"type": "reverse_kl", "advantage": advantage, "trust": trust}
        for advantage in ("current", "rollout")
        for trust in TRUSTS
    ),
    *({"type": "reverse_kl", "outside": "renormalise", "trust": trust} for trust in TRUSTS),
    {"type": "reverse_kl", "outside": "drop"},
    *(
        {"type": kind} | extra | outside
        for kind, extra in {
            "sparse_reverse_kl": {},
            "forward_kl": {},
            "jsd": {"beta": 0.3},
            "skew_forward_kl": {"alpha": 0.2},
            "skew_reverse_kl": {"alpha": 0.2},
        }.items()
        for outside in OUTSIDES
    ),
    *(
        {"type": kind} | extra | changed
        for kind, extra in {
            "reinforce": {},
            "ppo": {"advantage": "leave_one_out"},
            "grpo": {},
            "gspo": {},
            "gepo": {"defensive": 3.0},
        }.items()
        for changed in (*({"trust": trust} for trust in TRUSTS), *PENALTIES)
    ),
]
LEVELS = ("token", "sequence", "geometric")
CORRECTIONS: list[dict[str, Any] | None] = [
    None,
    *({"type": "none", "prox": prox} for prox in (False, True)),
    *(
        {"type": kind, "prox": prox, "level": level} | extra
        for kind, extra in {
            "importance": {},
            "truncated": {"max_ratio": 1.1},
            "masked": {"min_ratio": 0.8, "max_ratio": 1.2},
        }.items()
        for prox in (False, True)
        for level in LEVELS
    ),
]
SUPPORTS: list[dict[str, Any]] = [
    {"type": "mc", "m": 3},
    {"type": "path"},
    {"type": "topk", "k": 2},
    {"type": "atoms_tail", "k": 1, "m": 2},
    {"type": "exact"},
    {"type": "teacher_topk", "k": 2},
    {"type": "teacher_mc", "m": 3},
]
REDUCTIONS: list[dict[str, Any]] = [
    {"type": "token_mean"},
    {"type": "sequence_mean"},
    {"type": "fixed_length", "length": 5},
]
MIXTURES: list[dict[str, Any]] = [
    {"type": "mixture", "terms": [{"coefficient": c, "objective": o} for c, o in parts]}
    for parts in (
        [(0.7, {"type": "forward_kl"}), (0.3, {"type": "sparse_reverse_kl"})],
        [(0.7, {"type": "forward_kl"}), (0.5, {"type": "reverse_kl", "trust": {"type": "m2"}})],
        [(0.7, {"type": "reverse_kl"}), (2.0, {"type": "grpo", "trust": {"type": "none"}})],
        [(1.0, {"type": "jsd", "outside": "bucket"}), (0.5, {"type": "gspo"})],
        [(1.0, {"type": "forward_kl"}), (0.5, {"type": "gepo"})],
        [(1.0, {"type": "grpo"}), (0.5, {"type": "reinforce"})],
    )
]


def products() -> Iterator[dict[str, Any]]:
    """Every support x objective x correction (trust inside the objective), as configuration."""
    for support, objective, correction in itertools.product(
        SUPPORTS, [*OBJECTIVES, *MIXTURES], CORRECTIONS
    ):
        tree = {"support": support, "objective": objective}
        yield tree if correction is None else tree | {"correction": correction}


@cache
def accepted() -> tuple[Estimator, ...]:
    """Those that config accepts, with the reductions in turn; found once a process, in seconds."""
    found: list[Estimator] = []
    for tree in products():
        reduction = REDUCTIONS[len(found) % len(REDUCTIONS)]
        with suppress(ValidationError):
            found.append(Estimator.model_validate(tree | {"reduction": reduction}))
    return tuple(found)


@cache
def by_turn() -> tuple[Estimator, ...]:
    """Every ninth of those that read rewards, with rewards of turns."""
    rewarded = [est for est in accepted() if est.reads_reward]
    return tuple(est.model_copy(update={"credit": "turn"}) for est in rewarded[::9])


def estimator(**tree: Any) -> Estimator:
    return Estimator.model_validate(tree)
