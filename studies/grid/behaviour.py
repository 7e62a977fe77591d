"""What decides the figures of a run, so that a row is known to be of today's code.

A digest has the values of the resolved configuration, the loss and its gradient of the configured
estimator on made-up caches, and the bytes of models and data. So code may be moved, named otherwise
or explained better without a change, and new keys change nothing as long as they are not set:
known_keys.json lists those that counted when rows were recorded, others count where they are not
as by default. What samples, updates and evaluates is held equal by tests, and a row names its
commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch

from harness.tree import ROOT
from megatron_opd.batching.advantages import columns_of
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.load import load_config
from megatron_opd.config.roles import STUDENT, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.objective import evaluate
from megatron_opd.report.config_diff import resolve

KNOWN = Path(__file__).with_name("known_keys.json")
RECORDED_AS = ("studies.findings.", "benchmarks.findings.")
"""The module of the controls' losses, and its name when rows were recorded."""
IGNORED = ("run.dir.", "metrics.", "checkpoint.", "data.train.", "data.heldout.")
"""Keys that decide no figure; of models and data files the bytes count, not the names."""
PROBES, LENGTHS, GROUP, VOCAB = 3, (5, 2, 7, 1, 4, 6), 2, 6
SPREAD_NATS = 0.7  # between student, prox, sampler and teacher: clips and truncations act
DIGITS = 6  # of a golden figure: beyond what processors and libraries disagree in


def behaviour(config: Path, overrides: Mapping[str, str]) -> str:
    """Return a digest of what a run of `config` with these overrides does."""
    sets = [f"{key}={value}" for key, value in overrides.items()]
    found = load_config(Config, ROOT / config, sets)
    parts = [values_of(found), golden(found.estimator), files_of(found)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def values_of(config: Config) -> dict[str, str]:
    """Return the values that count, by dotted key."""
    resolved, known = resolve(config.model_dump(mode="json")), known_keys()
    return {
        key: value.replace(*RECORDED_AS)
        for key, value in resolved.all.items()
        if not f"{key}.".startswith(IGNORED)
        and not key.endswith(".model")
        and (key in known or value != resolved.defaults.get(key))
    }


@cache
def known_keys() -> frozenset[str]:
    """Return the keys that count whatever their value is."""
    return frozenset(json.loads(KNOWN.read_text(encoding="utf-8")))


@cache
def golden(estimator: Estimator) -> list[str]:
    """Return losses and gradients of an estimator on made-up caches."""
    figures: list[float] = []
    for seed in range(PROBES):
        probe = made_up(estimator, seed)
        found = evaluate(estimator, probe)
        (grad_N,) = torch.autograd.grad(found.loss_sum, probe.student_logp_N, allow_unused=True)
        figures += [found.loss_sum.item(), float(found.count)]
        figures += [] if grad_N is None else grad_N.tolist()
    return [f"{figure:.{DIGITS}g}" for figure in figures]


def made_up(estimator: Estimator, seed: int) -> Cache:
    """Return a cache of drawn numbers, as wide as the support is and with rewards."""
    rng, rows = np.random.default_rng(seed), sum(LENGTHS)
    logp = rng.normal(size=(rows, VOCAB)) + SPREAD_NATS * rng.normal(size=(4, rows, VOCAB))
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    student, prox, sampler, teacher = logp
    path = np.array([rng.choice(VOCAB, p=np.exp(row)) for row in sampler])
    alone = estimator.support.type == "path"
    ids = [[p] if alone else range(VOCAB) for p in path]
    row_N = np.repeat(np.arange(rows), [len(each) for each in ids])
    id_N = np.concatenate([np.array(each) for each in ids])
    weight_N = np.ones(len(id_N)) if alone else np.exp(sampler[row_N, id_N])
    on_path_N = id_N == path[row_N]
    sampler_N = sampler[row_N, id_N].copy()
    if estimator.support.owner == "teacher":
        sampler_N[~on_path_N] = np.nan
        weight_N = np.exp(teacher[row_N, id_N])
    sample_T = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    logq_B = np.array(
        [sampler[sample_T == b, path[sample_T == b]].mean() for b in range(len(LENGTHS))]
    )
    groups = np.arange(len(LENGTHS)) // GROUP
    columns = columns_of(estimator, rng.normal(size=len(LENGTHS)), logq_B, groups)
    ones_B = torch.ones(len(LENGTHS), dtype=torch.float64)
    return Cache(
        student_logp_N=torch.tensor(student[row_N, id_N], requires_grad=True),
        sampler_logp_N=torch.tensor(sampler_N),
        teacher_logp_N=torch.tensor(teacher[row_N, id_N]),
        prox_logp_N=torch.tensor(prox[row_N, id_N]) if estimator.applied_correction.prox else None,
        weight_N=torch.tensor(weight_N),
        row_N=torch.tensor(row_N),
        path_T=torch.tensor(np.flatnonzero(on_path_N)),
        sample_T=torch.tensor(sample_T),
        advantage_B=torch.tensor(columns.advantage_B),
        group_log_q_B=torch.tensor(columns.group_log_q_B),
        defensive_B=torch.tensor(columns.defensive_B),
        reward_weight_B=ones_B,
        teacher_weight_B=ones_B,
        imitation_weight_B=torch.zeros_like(ones_B),
        share_B=ones_B,
    )


def files_of(config: Config) -> list[str]:
    """Return digests of the models and the data of a run."""
    models = [section_of(config, role).model for role in (STUDENT, *teacher_roles(config))]
    data = [file.path for file in config.data.train]
    data += [each.file for each in config.data.heldout.values()]
    return [digest_of(path) for path in (*models, *data)]


@cache
def digest_of(path: Path) -> str:
    """Return the digest of a data file, or of a model's weights, configuration and tokenizer."""
    path, digest = ROOT / path, hashlib.sha256()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if path.is_file() or file.suffix in (".safetensors", ".json"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
