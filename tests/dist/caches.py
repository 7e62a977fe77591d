"""Hand-made batches with a draw cache, and an independent float64 computation of their update.

The oracle shares no code with the project: transformers runs each sample alone, the loss is written
out from its formula, autograd differentiates it, torch's AdamW takes the step.
"""

import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron_opd.records.runs import SampledRun
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import (
    Batch,
    Prompt,
    Rollout,
    Sample,
    TurnFigures,
    VersionSpan,
)
from sglang_bridge.protocol import DrawCache


def load_float64(model: Path) -> torch.nn.Module:
    """The checkpoint under transformers with float64 weights.

    Two traps of transformers as a reference. Its embedding drops the gradient of `pad_token_id`,
    which may occur in a text: switched off here. Its RMSNorm (and its rotary angles) are computed
    in float32 even in a float64 model, so that it is exact to about 1e-7 only.
    """
    # The grouped matmul of the default expert implementation takes no float64.
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    loaded = AutoModelForCausalLM.from_pretrained(model, **options).eval()
    loaded.get_input_embeddings().padding_idx = None
    return loaded


def response_logp(model: torch.nn.Module, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """float64 [T, V]: row t predicts sampled token t, each sequence computed whole and alone."""
    rollout = sample.rollout
    rows = []
    for number, ids_S in enumerate(rollout.sequences):
        logits = model(torch.tensor(ids_S, dtype=torch.int64)[None]).logits[0].double()
        logp_SV = torch.log_softmax(logits / temperature, -1)
        own = [run for run in rollout.runs if run.sequence == number]
        rows += [logp_SV[run.start - 1 : run.stop - 1] for run in own]
    return torch.cat(rows)


def row_N(draws: DrawCache) -> torch.Tensor:
    return torch.repeat_interleave(
        torch.arange(draws.num_tokens), torch.tensor(np.diff(draws.offsets_T1))
    )


def chosen(logp_TV: torch.Tensor, draws: DrawCache) -> torch.Tensor:
    return logp_TV[row_N(draws), torch.tensor(draws.ids_N, dtype=torch.int64)]


def in_turns(rollout: Rollout, rng: np.random.Generator, vocab: int, turns: int) -> Rollout:
    """The same sampled tokens with given ones between, in one sequence or two.

    The second sequence begins with another prompt. turns: most of them.
    """
    tokens = rollout.num_response_tokens
    count = int(rng.integers(1, min(turns, tokens) + 1))
    edges = [0, *sorted(rng.choice(np.arange(1, tokens), count - 1, replace=False)), tokens]
    branch = int(rng.integers(1, count)) if count > 2 else count
    sequences, runs = [[*rollout.prompt.token_ids_P.tolist()]], []
    for turn, (first, last) in enumerate(pairwise(edges)):
        if turn == branch:
            sequences.append([])
        ids = sequences[-1]
        if turn:
            ids += rng.integers(2, vocab, int(rng.integers(1, 9))).tolist()
        runs.append(SampledRun(len(sequences) - 1, len(ids), len(ids) + last - first, turn))
        ids += rollout.response_ids_T[first:last].tolist()
    whole = tuple(np.array(ids, np.int32) for ids in sequences)
    return replace(rollout, sequences=whole, runs=tuple(runs))


def make_batch(
    model: Path,
    *,
    samples: int,
    seed: int,
    vocab: int,
    update: int = 0,
    temperature: float = 1.0,
    turns: int = 1,
) -> Batch:
    """Ragged rows around the model's own log-probs; some path tokens have weight 0 and a teacher
    score of -inf, some tokens are stale. turns: the most that a sample has, see in_turns."""
    rng = np.random.default_rng(seed)
    student = load_float64(model)
    made: list[Sample] = []
    for uid in range(samples):
        num_prompt, num_tokens = int(rng.integers(1, 9)), int(rng.integers(1, 25))
        counts = rng.integers(1, 6, num_tokens)
        ids = [np.sort(rng.choice(vocab, n, replace=False)) for n in counts]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        path = np.array([rng.integers(first, last) for first, last in pairwise(offsets)])
        weight = rng.random(offsets[-1]) + 0.1
        unhit = path[(counts > 1) & (rng.random(num_tokens) < 0.3)]
        weight[unhit] = 0
        weight /= np.repeat(np.add.reduceat(weight, offsets[:-1]), counts)
        draws = DrawCache(
            offsets_T1=offsets,
            ids_N=np.concatenate(ids).astype(np.int32),
            path_T=path,
            weight_N=weight.astype(np.float32),
            sampler_logp_N=np.zeros(offsets[-1], np.float32),
        )
        rollout = single_turn(
            Prompt(uid, "", rng.integers(2, vocab, num_prompt).astype(np.int32)),
            draws.ids_N[path],
            draws,
            (VersionSpan(update, 0, num_tokens),),
            "stop",
            0.0,
            1.0,
        )
        if turns > 1:
            rollout = in_turns(rollout, rng, vocab, turns)
        sample = Sample(rollout, np.zeros(offsets[-1], np.float32))
        with torch.no_grad():
            own = chosen(response_logp(student, sample, temperature), draws).numpy()
        sampler = own + 0.3 * rng.standard_normal(len(own))
        teacher = own + rng.standard_normal(len(own))
        teacher[unhit] = -np.inf
        draws = replace(draws, sampler_logp_N=sampler.astype(np.float32))
        made.append(Sample(replace(rollout, draws=draws), teacher.astype(np.float32)))
    return Batch(update, update, tuple(made))


def with_turn_rewards(batch: Batch, seed: int) -> Batch:
    """The batch as if an environment had rewarded three of four turns."""
    rng, samples = np.random.default_rng(seed), []
    for sample in batch.samples:
        rewards = [
            float(rng.normal()) if rng.random() < 0.75 else None for _ in sample.rollout.runs
        ]
        turns = tuple(TurnFigures(1.0, 0.0, reward=reward) for reward in rewards)
        rollout = replace(sample.rollout, turns=turns)
        samples.append(replace(sample, rollout=rollout, reward=sum(r or 0.0 for r in rewards)))
    return replace(batch, samples=tuple(samples))


def turn_advantages(batch: Batch, group_size: int) -> list[torch.Tensor]:
    """float64 [T] of each sample: (r - mean) / std over the group's rewards at one position."""
    found: list[torch.Tensor] = []
    for place, sample in enumerate(batch.samples):
        first = place // group_size * group_size
        members = batch.samples[first : first + group_size]
        own: list[float] = []
        for run in sample.rollout.runs:
            turns = [each.rollout.turns for each in members]
            there = [each[run.turn].reward for each in turns if run.turn < len(each)]
            rewards = [reward for reward in there if reward is not None]
            mine, advantage = sample.rollout.turns[run.turn].reward, 0.0
            if mine is not None and len(rewards) > 1:
                deviation = statistics.stdev(rewards)
                advantage = (mine - statistics.mean(rewards)) / (deviation + 1e-6)
            own += [advantage] * run.num_tokens
        found.append(torch.tensor(own, dtype=torch.float64))
    return found


@dataclass(frozen=True)
class OracleUpdate:
    loss: float
    reverse_kl: float
    grad_norm: float
    weights: dict[str, torch.Tensor]


def oracle_update(
    model: Path,
    batch: Batch,
    *,
    lr: float,
    eps: float,
    clip: float,
    max_ratio: float | None = None,
    temperature: float = 1.0,
    advantages: list[torch.Tensor] | None = None,
) -> OracleUpdate:
    """One AdamW step (betas 0.9, 0.95, no weight decay) in float64.

    loss = -1/T sum_t sum_k w_k min(rho_k, C) (q_k - p_k); its gradient is taken from a second
    expression, -1/T sum w_k sg(min(rho_k, C) (q_k - p_k)) p_k. advantages: of each sample's tokens;
    adds -1/T sum_t rho_t A_t over the sampled ids.
    """
    student = load_float64(model)
    tokens = batch.num_response_tokens
    loss = kl = 0.0
    for number, sample in enumerate(batch.samples):
        draws = sample.rollout.draws
        logp = chosen(response_logp(student, sample, temperature), draws)
        weight = torch.tensor(draws.weight_N, dtype=torch.float64)
        hit = weight > 0
        gap = (torch.tensor(sample.teacher_logp_N).double() - logp)[hit].detach()
        ratio = (logp - torch.tensor(draws.sampler_logp_N).double())[hit].exp().detach()
        used = ratio if max_ratio is None else ratio.clamp(max=max_ratio)
        surrogate = -(weight[hit] * used * gap * logp[hit]).sum() / tokens
        if advantages is not None:
            sampler = torch.tensor(draws.sampler_logp_N).double()
            rewarded = ((logp - sampler)[draws.path_T].exp() * advantages[number]).sum() / tokens
            surrogate = surrogate - rewarded
            loss -= float(rewarded.detach())
        surrogate.backward()
        loss += float(-(weight[hit] * used * gap).sum() / tokens)
        kl += float(-(weight[hit] * ratio * gap).sum() / tokens)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.0
    )
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), clip)
    optimizer.step()
    weights = {name: value.detach() for name, value in per_expert(student).items()}
    if student.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return OracleUpdate(loss, kl, float(norm), weights)


def per_expert(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """transformers fuses experts in memory; on disk each has its own tensors, but for gpt-oss."""
    if getattr(model.config, "model_type", None) == "gpt_oss":
        return dict(model.state_dict())
    found: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for expert, fused in enumerate(value):
                gate, up = fused.chunk(2)
                found[f"{base}{expert}.gate_proj.weight"] = gate
                found[f"{base}{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            for expert, part in enumerate(value):
                found[f"{base}{expert}.down_proj.weight"] = part
        else:
            found[name] = value
    if model.config.model_type in ("minimax_m2", "mixtral"):
        return {published(name): value for name, value in found.items()}
    return found


def published(name: str) -> str:
    """What files of Mixtral and MiniMax call a tensor."""
    for held, said in (("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3")):
        name = name.replace(f".{held}.", f".{said}.")
    return name.replace(".down_proj.", ".w2.")


def inputs(batch: Batch) -> list[int]:
    """Tokens that each sample's model call reads."""
    rollouts = [sample.rollout for sample in batch.samples]
    return [rollout.num_tokens - len(rollout.sequences) for rollout in rollouts]


def with_experts(batch: Batch, experts_XLk: np.ndarray) -> Batch:
    """The batch as if the fleet had routed it so."""
    parts = np.split(experts_XLk, np.cumsum(inputs(batch))[:-1])
    samples = tuple(
        replace(sample, rollout=replace(sample.rollout, experts_XLk=part))
        for sample, part in zip(batch.samples, parts, strict=True)
    )
    return replace(batch, samples=samples)


def with_gates(batch: Batch, gates_XLk: np.ndarray) -> Batch:
    """The batch as if its experts had weighed so much in the fleet."""
    parts = np.split(gates_XLk.astype(np.float32), np.cumsum(inputs(batch))[:-1])
    samples = tuple(
        replace(sample, rollout=replace(sample.rollout, gates_XLk=part))
        for sample, part in zip(batch.samples, parts, strict=True)
    )
    return replace(batch, samples=samples)


def random_gates(batch: Batch, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """float32 [X, L, k] that add up to 1. shape: (L, k)."""
    drawn = np.random.default_rng(seed).random((sum(inputs(batch)), *shape)) + 0.1
    return (drawn / drawn.sum(-1, keepdims=True)).astype(np.float32)


def random_experts(batch: Batch, seed: int, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [X, L, k] of distinct experts. shape: (L, experts, k)."""
    layers, experts, topk = shape
    order = np.random.default_rng(seed).random((sum(inputs(batch)), layers, experts))
    return order.argsort(-1)[..., :topk].astype(np.uint8)
