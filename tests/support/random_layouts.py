"""Random models, learners and servers that fit each other. Torch-free."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.families.table import FAMILIES
from megatron_opd.models.latent import Latent
from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.plan import ServerLayout, SyncSettings
from tests.support.published import spec_of


@dataclass(frozen=True)
class Case:
    """What is planned for whom."""

    spec: ModelSpec
    parallel: ParallelConfig
    servers: tuple[ServerLayout, ...]
    settings: SyncSettings
    near: tuple[int, ...] = ()


def random_spec(rng: random.Random) -> ModelSpec:
    """A model of a few layers whose sizes divide by 4, or just do not matter."""
    family = FAMILIES[rng.choice(sorted(FAMILIES))]
    kv_heads, layers = rng.choice([1, 2, 4, 8]), rng.choice([2, 2, 4])
    return replace(
        spec_of("Qwen3-1.7B"),
        family=family,
        num_layers=layers,
        hidden_size=12,
        num_heads=kv_heads * rng.choice([1, 2, 4]),
        num_kv_heads=kv_heads,
        head_dim=rng.randint(1, 3),
        ffn_size=8,
        vocab_size=rng.randint(60, 140),
        tied=rng.random() < 0.5,
        num_experts=4 if family.moe else 0,
        experts_per_token=2 if family.moe else 0,
        expert_ffn_size=8 if family.moe else 0,
        moe_layers=tuple(family.moe and rng.random() < 0.5 for _ in range(layers)),
        latent=Latent(3, 5, 1, 2, 2) if family.latent else None,
    )


def random_learner(rng: random.Random, spec: ModelSpec) -> ParallelConfig:
    """A layout that the model can be cut into."""
    while True:
        tp, pp = rng.choice([1, 2, 4]), rng.choice([1, 2])
        sizes = {"tp": tp, "pp": pp, "cp": rng.choice([1, 2]), "dp": rng.choice([1, 2])}
        if pp > 1 and spec.num_layers == 4 and rng.random() < 0.5:
            sizes["vpp"] = 2
        if spec.is_moe:
            sizes |= {"ep": rng.choice([1, 2, 4]), "etp": rng.choice([1, tp])}
        try:
            parallel = ParallelConfig.model_validate(sizes)
            spec.check_parallel(parallel)
        except ValueError:
            continue
        return parallel


def random_server(rng: random.Random, spec: ModelSpec) -> ServerLayout:
    """A layout that SGLang can serve the model in."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    fitting = [
        tp for tp in (1, 2, 4) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    ]
    tp = rng.choice(fitting)
    return ServerLayout(tp, rng.choice([n for n in (1, 2, 4) if tp % n == 0]) if spec.is_moe else 1)


def random_case(seed: int) -> Case:
    """One to five servers, of up to two layouts in any order."""
    rng = random.Random(seed)
    spec = random_spec(rng)
    layouts = [random_server(rng, spec) for _ in range(2)]
    servers = tuple(rng.choice(layouts) for _ in range(rng.choice([1, 2, 2, 3, 5])))
    limit = rng.choice([20, 100, 400, 10**6])
    staged = rng.choice([0, 0, 1000, 6000, float("inf")])
    format = rng.choice([None, "int8", "fp8"])
    settings = SyncSettings("bfloat16", format, limit, staged, relays=rng.random() < 0.5)
    parallel = random_learner(rng, spec)
    near: tuple[int, ...] = ()
    if not settings.relays and rng.random() < 0.5:  # some share a GPU with a rank of the learner
        receivers = sum(server.tp for server in servers)
        near = tuple(rng.randrange(-1, parallel.world_size) for _ in range(receivers))
    return Case(spec, parallel, servers, settings, near)
