"""Draws of delays: quantiles, distribution, cut, and of what a draw is a function."""

import math
from collections.abc import Callable
from statistics import NormalDist, fmean, median, pvariance

import pytest

from megatron_opd.buffer.delays import DelayStream, batch_plan, quantile_s
from megatron_opd.config.delays import DelayConfig, DelayType
from megatron_opd.config.schedule import ScheduleConfig
from tests.support.config_files import minimal

LOW_S, HIGH_S = 60.0, 1800.0
DRAWS = 4000
# the 99.9% quantile of Kolmogorov's distribution; seeded draws are the same in every run
FURTHEST = 1.95 / math.sqrt(DRAWS)


def made(kind: DelayType, time_scale: float = 1.0) -> DelayConfig:
    return DelayConfig(type=kind, low_s=LOW_S, high_s=HIGH_S, time_scale=time_scale)


def draws(config: DelayConfig, seed: int = 1, stream: str = "east/weights") -> list[float]:
    delays = DelayStream(config, seed, stream)
    return [delays.seconds(i) for i in range(DRAWS)]


# ------------------------------------------------------------ the distributions, by their functions


def lognormal_share(delay: float) -> float:
    """Share of draws up to `delay`: the normal whose +-2.807 sigma are the logs of the ends."""
    middle, half = math.sqrt(LOW_S * HIGH_S), math.log(HIGH_S / LOW_S) / 2
    return NormalDist().cdf(2.807033768343811 * math.log(delay / middle) / half)


def weibull_share(delay: float) -> float:
    """Share of draws up to `delay`: hazards grow as a power, through those of the two ends."""
    at_low, at_high = math.log(1 / 0.9975), math.log(1 / 0.0025)
    shape = math.log(at_high / at_low) / math.log(HIGH_S / LOW_S)
    return 1 - math.exp(-at_low * (delay / LOW_S) ** shape)


def exponential_share(delay: float) -> float:
    """Share of draws up to `delay`: a constant hazard from LOW_S on, 0.5% left at HIGH_S."""
    return 1 - 0.005 ** ((delay - LOW_S) / (HIGH_S - LOW_S))


SHARES: dict[DelayType, Callable[[float], float]] = {
    "lognormal": lognormal_share,
    "weibull": weibull_share,
    "exponential": exponential_share,
}
ENDS: dict[DelayType, tuple[float, float]] = {
    "lognormal": (0.0025, 0.9975),
    "weibull": (0.0025, 0.9975),
    "exponential": (0.0, 0.995),
}


@pytest.mark.parametrize("kind", SHARES)
def test_a_quantile_is_the_inverse_of_the_distribution_function(kind: DelayType):
    for share in (0.001, 0.0025, 0.1, 0.5, 0.9, 0.99):
        assert SHARES[kind](quantile_s(made(kind), share)) == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize("kind", SHARES)
def test_995_in_a_thousand_lie_between_the_two_ends(kind: DelayType):
    below, above = ENDS[kind]
    assert above - below == pytest.approx(0.995)
    if below:
        assert quantile_s(made(kind), below) == pytest.approx(LOW_S, rel=1e-9)
    assert quantile_s(made(kind), above - 1e-9) == pytest.approx(HIGH_S, rel=1e-6)


@pytest.mark.parametrize("kind", SHARES)
def test_what_lies_beyond_the_upper_end_is_cut_there(kind: DelayType):
    above = ENDS[kind][1]
    assert quantile_s(made(kind), above + 1e-9) == HIGH_S
    assert quantile_s(made(kind), 1 - 2**-53) == HIGH_S
    # and the share of draws that are exactly there is what the tail holds: 10 or 20 of 4000
    cut = sum(drawn == HIGH_S for drawn in draws(made(kind)))
    expected = DRAWS * (1 - above)
    assert abs(cut - expected) < 3.5 * math.sqrt(expected)
    assert cut > 0


@pytest.mark.parametrize("kind", SHARES)
def test_seeded_draws_follow_the_distribution(kind: DelayType):
    """Kolmogorov-Smirnov on what lies below the cut."""
    found = sorted(draws(made(kind)))
    distances = [
        max(abs(SHARES[kind](x) - i / DRAWS), abs(SHARES[kind](x) - (i + 1) / DRAWS))
        for i, x in enumerate(found)
        if x < HIGH_S
    ]
    assert max(distances) < FURTHEST


@pytest.mark.parametrize("kind", SHARES)
def test_moments_are_those_of_the_cut_distribution(kind: DelayType):
    """Against the integral of the quantiles over all shares, by the midpoint rule."""
    points = [quantile_s(made(kind), (i + 0.5) / 20_000) for i in range(20_000)]
    mean, deviation = fmean(points), math.sqrt(pvariance(points))
    found = draws(made(kind))
    assert abs(fmean(found) - mean) < 3.5 * deviation / math.sqrt(DRAWS)
    assert math.sqrt(pvariance(found)) == pytest.approx(deviation, rel=0.1)


def test_the_lognormal_median_is_the_geometric_mean_of_the_ends():
    assert quantile_s(made("lognormal"), 0.5) == pytest.approx(math.sqrt(LOW_S * HIGH_S))
    assert median(draws(made("lognormal"))) == pytest.approx(math.sqrt(LOW_S * HIGH_S), rel=0.05)


def test_an_exponential_delay_may_begin_at_nothing_and_have_no_width():
    point = DelayConfig(type="exponential", low_s=5.0, high_s=5.0)
    assert quantile_s(point, 0.3) == 5.0
    assert quantile_s(DelayConfig(type="exponential", low_s=0.0, high_s=1.0), 1e-12) < 1e-9


@pytest.mark.parametrize("kind", ["lognormal", "weibull"])
def test_ends_as_far_apart_as_floats_are_make_no_overflow(kind: DelayType):
    config = DelayConfig(type=kind, low_s=1e-300, high_s=1e300)
    for share in (2**-53, 0.5, 1 - 2**-53):
        assert 0 <= quantile_s(config, share) <= 1e300


# ------------------------------------------------------------ of what a draw is a function


def test_a_draw_follows_from_seed_stream_and_number_alone():
    config = made("lognormal")
    whole = draws(config)
    again = DelayStream(config, 1, "east/weights")
    assert [again.seconds(i) for i in reversed(range(20))] == whole[19::-1]
    assert draws(config) == whole
    for other in (draws(config, seed=2), draws(config, stream="west/weights")):
        assert not set(other[:500]) & set(whole[:500])


def test_neighbouring_messages_and_streams_are_not_correlated():
    config = made("exponential")
    first = draws(config)
    for second in (first[1:] + first[:1], draws(config, stream="east/samples")):
        mean, variance = fmean(first), pvariance(first)
        covariance = fmean(a * b for a, b in zip(first, second, strict=True)) - mean * fmean(second)
        assert abs(covariance / variance) < 0.06  # 3.8 standard errors


def test_time_scale_multiplies_every_delay():
    for whole, scaled in zip(draws(made("weibull")), draws(made("weibull", 1 / 64)), strict=True):
        assert scaled == whole / 64


def test_constant_and_none_are_always_the_same():
    assert set(draws(made("constant", 0.5))) == {LOW_S / 2}
    assert set(draws(made("none"))) == {0.0}


def test_what_a_site_receives_and_sends_is_delayed_apart():
    delays = {"type": "lognormal", "low_s": LOW_S, "high_s": HIGH_S}
    members = {"members": {"east": {}, "west": {}}}
    config = minimal(
        sites=members | {"weight_delays": delays, "sample_delays": delays},
        weight_sync={"type": "disk", "directory": "unused"},
        evaluation={"problems": 0},
    )
    streams = (
        DelayStream.of(config, "east", "weights"),
        DelayStream.of(config, "east", "samples"),
        DelayStream.of(config, "west", "samples"),
    )
    found = [[stream.seconds(i) for i in range(5)] for stream in streams]
    assert len({delay for delays in found for delay in delays}) == 15


# ------------------------------------------------------------ the staleness of batches


def schedule(kind: DelayType, most: float = 64.0) -> ScheduleConfig:
    delays = DelayConfig(type=kind, low_s=LOW_S, high_s=HIGH_S)
    return ScheduleConfig(type="controlled", max_staleness=most, delays=delays)


def staleness(config: ScheduleConfig, updates: int = DRAWS, seed: int = 1) -> list[int]:
    plan = batch_plan(config, seed, updates)
    assert plan is not None
    return [update - source for update, source in enumerate(plan.sources)]


@pytest.mark.parametrize("kind", SHARES)
def test_a_batchs_staleness_is_its_share_of_the_longest_delay(kind: DelayType):
    found = staleness(schedule(kind))[64:]
    assert max(found) == 64
    assert min(found) in (1, 2), "60 s of 1800 s are 2.1 of 64 updates"
    expected = [64 * drawn / HIGH_S for drawn in stale_draws(kind)][64:]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 0.5 + 1e-9


def stale_draws(kind: DelayType) -> list[float]:
    return draws(made(kind), stream="batches")


def test_a_constant_delay_makes_each_batch_as_old_as_it_can_be():
    config = DelayConfig(type="constant", low_s=1.0, high_s=1.0)
    exact = ScheduleConfig(type="controlled", max_staleness=8.0, delays=config)
    assert staleness(exact, 20) == [0, 1, 2, 3, 4, 5, 6, 7, *[8] * 12]


def test_the_plan_of_batches_follows_from_the_seed():
    config = schedule("weibull")
    assert staleness(config) == staleness(config)
    assert staleness(config) != staleness(config, seed=2)
    assert staleness(config)[:50] == staleness(config, 50), "whatever is to come"


def test_without_delays_there_is_no_plan():
    assert batch_plan(ScheduleConfig(type="controlled"), 1, 10) is None
