"""Every element reaches every server rank that wants it, once, from a rank that holds it."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.families.table import FAMILIES
from megatron_opd.models.latent import Latent
from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.holdings import Held, learner_holdings, server_holdings
from megatron_opd.weight_sync.reshard import (
    CannotReshard,
    bytes_passed_on,
    bytes_received,
    bytes_sent,
    num_pairs,
    plan_routes,
)
from tests.support.published import spec_of

ONE = {"plain": 1, "exact": 1}
SMALL = spec_of("Qwen3-1.7B")
DEGREES = st.sampled_from([1, 2, 4])


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """A model of a few layers whose sizes divide by 4 or just do not matter."""
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    layers = draw(st.sampled_from([2, 4]))
    return replace(
        SMALL,
        family=family,
        num_layers=layers,
        hidden_size=12,
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        ffn_size=8,
        vocab_size=draw(st.integers(60, 140)),
        tied=draw(st.booleans()),
        num_experts=8 if family.moe else 0,
        experts_per_token=2 if family.moe else 0,
        expert_ffn_size=8 if family.moe else 0,
        moe_layers=tuple(family.moe and draw(st.booleans()) for _ in range(layers)),
        latent=Latent(3, 5, 1, 2, 2) if family.latent else None,
    )


@st.composite
def learners(draw: st.DrawFn, spec: ModelSpec) -> ParallelConfig:
    """A layout that the model can be cut into."""
    tp, pp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2], [1, 2], [1, 2]))
    sizes: dict[str, int] = {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
    if pp > 1 and spec.num_layers == 4 and draw(st.booleans()):
        sizes["vpp"] = 2
    if spec.is_moe:
        sizes["ep"] = draw(st.sampled_from([1, 2, 4]))
        sizes["etp"] = draw(st.sampled_from([1, tp]))
        assume((tp * cp * dp) % (sizes["ep"] * sizes["etp"]) == 0)
    try:
        parallel = ParallelConfig.model_validate(sizes)
        spec.check_parallel(parallel)
    except ValueError:
        assume(False)
        raise
    return parallel


def rows_of(held: Held) -> tuple[slice, ...]:
    """The part of the whole tensor."""
    index = [slice(None)] * len(held.shape)
    index[held.dim] = slice(held.start, held.start + held.length)
    return tuple(index)


def by_rank(parts: list[Held]) -> dict[tuple[str, int], np.ndarray]:
    """{(tensor, rank): whether the rank holds each element}."""
    found: dict[tuple[str, int], np.ndarray] = {}
    for part in parts:
        for rank in part.ranks:
            mask = found.setdefault((part.name, rank), np.zeros(part.shape, bool))
            assert not mask[rows_of(part)].any(), "no rank holds an element twice"
            mask[rows_of(part)] = True
    return found


@settings(max_examples=100)  # whole plans of 2,000 layouts: test_plan.py
@given(data=st.data())
def test_every_element_arrives_once_from_a_rank_that_holds_it(data: st.DataObject):
    spec = data.draw(models())
    parallel = data.draw(learners(spec))
    tp = data.draw(DEGREES)
    assume(spec.num_heads % tp == 0)
    assume(spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0)
    ep = data.draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0])) if spec.is_moe else 1
    servers = data.draw(st.integers(1, 3))
    learner = list(learner_holdings(spec, parallel))
    server = list(server_holdings(spec, tp, ep))
    routes = plan_routes(learner, server)
    assert routes == plan_routes(learner, server)
    sources, wanted = by_rank(learner), by_rank(server)
    for at in range(servers):
        written: dict[tuple[str, int], np.ndarray] = {}
        for route in routes:
            shape = sources[route.name, route.source(at)].shape
            place = rows_of(Held(route.name, shape, route.dim, route.start, route.length, ()))
            assert sources[route.name, route.source(at)][place].all(), "its source holds it"
            times = written.setdefault((route.name, route.destination), np.zeros(shape, np.int64))
            times[place] += 1
            assert times[place].size == route.elements
        assert written.keys() == wanted.keys()
        assert all((written[key] == wanted[key]).all() for key in wanted)
    received = bytes_received(routes, ONE)
    assert sum(received.values()) == sum(mask.sum() for mask in wanted.values())
    sent: Counter[int] = Counter()
    for route in routes:
        for at in range(servers):
            sent[route.source(at)] += route.elements
    assert bytes_sent(routes, servers, ONE) == sent
    first = [(route, at) for route in routes for at in range(min(servers, len(route.sources)))]
    relayed: Counter[int] = Counter()
    for route, at in first:
        relayed[route.source(at)] += route.elements
    assert bytes_sent(routes, servers, ONE, relays=True) == relayed
    passed_on = bytes_passed_on(routes, servers, ONE)
    later = [route for route in routes if len(route.sources) < servers]
    assert sum(passed_on.values()) == sum(route.elements for route in later)
    direct = {(route.source(s), s, route.destination) for route in routes for s in range(servers)}
    assert num_pairs(routes, servers) == len(direct)
    chains = {
        (at, at + len(route.sources), route.destination)
        for route in routes
        for at in range(servers - len(route.sources))
    }
    given = {(route.source(at), at, route.destination) for route, at in first}
    assert num_pairs(routes, servers, relays=True) == len(given) + len(chains)
    assert max(sent) < parallel.world_size


@settings(max_examples=100)
@given(data=st.data())
def test_replicas_differ_by_at_most_one_route_of_each_size(data: st.DataObject):
    spec = data.draw(models())
    parallel = data.draw(learners(spec))
    servers = data.draw(st.integers(1, 5))
    routes = plan_routes(learner_holdings(spec, parallel), server_holdings(spec, 1, 1))
    counts: dict[tuple[tuple[int, ...], int], Counter[int]] = {}
    for route in routes:
        count = counts.setdefault((route.sources, route.elements), Counter())
        count.update(route.source(at) for at in range(servers))
    for (sources, _), count in counts.items():
        times = [count[rank] for rank in sources]
        # the turns of one server are even; servers start at neighbouring replicas
        assert max(times) - min(times) <= servers


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_every_rank_of_a_published_model_holds_adds_up(tp: int):
    spec = spec_of("Qwen3-30B-A3B")
    whole = sum(
        h.length * int(np.prod(h.shape)) // h.shape[h.dim] for h in server_holdings(spec, 1, 1)
    )
    routes = plan_routes(
        learner_holdings(spec, ParallelConfig(tp=2, ep=2, dp=2)), server_holdings(spec, tp, tp)
    )
    received = bytes_received(routes, ONE)
    assert len(received) == tp
    assert min(received.values()) >= whole / tp  # replicated norms and routers come on top
    assert max(received.values()) <= 1.02 * whole / tp


def test_a_tensor_that_the_learner_lacks_is_named():
    (part,) = [Held("odd.weight", (4,), 0, 0, 4, (0,))]
    with pytest.raises(CannotReshard, match=r"a tensor that the learner lacks: odd\.weight"):
        plan_routes([], [part])


def test_parts_that_do_not_fit_together_are_named():
    wanted = Held("w", (4, 4), 1, 0, 2, (0,))
    with pytest.raises(CannotReshard, match="w: the learner splits dimension 0, the servers dim"):
        plan_routes([Held("w", (4, 4), 0, i, 2, (0,)) for i in (0, 2)], [wanted])
    with pytest.raises(CannotReshard, match=r"w: the learner holds \[0:1\] of dimension 1 of the"):
        plan_routes([Held("w", (4, 4), 1, 0, 1, (0,))], [wanted])
