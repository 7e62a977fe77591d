"""Arrays come back as they were, log-probs within half a step; bytes that are none are refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.arrays import (
    CODES,
    F4,
    H1,
    I4,
    MAX_ERROR,
    Q2,
    U1,
    U2,
    U3,
    W2,
    narrow_weights,
    pack,
    pack_logp,
    pack_weights,
    unpack,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("values", "code", "width"),
    [
        ([0, 255], U1, 1),
        ([0, 256], U2, 2),
        ([65535, 1], U2, 2),
        ([65536, 0, 70_000], U3, 3),
        ([2**24 - 1], U3, 3),
        ([2**24], I4, 4),
        ([-1, 5], I4, 4),
        ([], U1, 1),
    ],
)
def test_whole_numbers_take_the_bytes_of_the_largest(values: list[int], code: bytes, width: int):
    raw = pack(np.array(values, np.int64))
    assert (raw[:4], len(raw)) == (code, 4 + width * len(values))
    found = unpack(raw, "<i4")
    assert (found.tolist(), found.dtype) == (values, np.int32)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
@settings(max_examples=200, deadline=None)
def test_any_int32_comes_back(values: list[int]):
    assert unpack(pack(np.array(values, np.int64)), "<i4").tolist() == values


def test_numbers_beyond_int32_are_not_packed():
    with pytest.raises(ValueError, match=r"expected numbers of int32, got 0\.\.2147483648"):
        pack(np.array([0, 2**31]))


def test_floats_come_back_exactly():
    values = RNG.normal(size=100).astype(np.float32)
    assert np.array_equal(unpack(pack(values), "<f4"), values)


def half_a_step(logp: np.ndarray) -> np.ndarray:
    """How far a log-prob may move: its root, by half a step of the lowest's."""
    root = np.sqrt(np.maximum(-logp.astype(np.float64), 0))
    half = root.max() / CODES / 2
    return (root + half) ** 2 - root**2


@pytest.mark.parametrize("lowest", [1e-3, 1.0, 17.5, 60.0, 128.0])
def test_log_probs_come_back_within_half_a_step_of_their_root(lowest: float):
    logp = (-lowest * RNG.random(5000) ** 3).astype(np.float32)
    logp[7], logp[8] = -lowest, 0.0
    raw = pack_logp(logp)
    assert (raw[:4], len(raw)) == (Q2, 8 + 2 * len(logp))
    found = unpack(raw, "<f4")
    error = np.abs(found.astype(np.float64) - logp)
    assert (error <= half_a_step(logp) * 1.01 + lowest * 2e-7).all()
    assert error.max() <= MAX_ERROR
    assert (found <= 0).all()
    assert found[8] == 0
    assert pack_logp(found) == raw, "narrowed twice they are the same"


def test_log_probs_of_likely_ids_keep_their_precision():
    """In equal steps of -logp everything above -1.5e-4 would become 0."""
    logp = np.array([-1e-6, -1e-5, -1e-4, -1e-3, -1e-2, -20], np.float32)
    found = unpack(pack_logp(logp), "<f4")
    np.testing.assert_allclose(found, logp, rtol=0.05)
    np.testing.assert_allclose(found[2:], logp[2:], rtol=0.01)


@pytest.mark.parametrize("odd", [-128.1, -1e9, -np.inf, np.nan, 0.5])
def test_one_odd_log_prob_leaves_the_others_exact(odd: float):
    """A teacher that masks an id says -1e9; in steps of that all others would be 0."""
    logp = np.array([-0.1, odd, -3.3], np.float32)
    assert pack_logp(logp)[:4] == F4
    assert np.array_equal(unpack(pack_logp(logp), "<f4"), logp, equal_nan=True)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [-1e-40], [1e-5, 0.0]])
def test_log_probs_of_certainty_are_0(values: list[float]):
    found = unpack(pack_logp(np.array(values, np.float32)), "<f4")
    assert found.tolist() == [0.0] * len(values)


@pytest.mark.parametrize("draws", [1, 3, 48, 64])
def test_weights_of_draws_are_counts_and_exact(draws: int):
    weights = (RNG.integers(0, draws + 1, 200) / draws).astype(np.float32)
    raw = pack_weights(weights, draws)
    assert (raw[:2], len(raw)) == (H1, 4 + len(weights))
    assert np.array_equal(unpack(raw, "<f4"), weights)


@pytest.mark.parametrize(
    ("weights", "draws"),
    [([0.3, 0.7], 64), ([0.5, 0.5], 0), ([2.0], 1), ([np.nan], 4), ([-0.25], 4), ([0.5], 65)],
)
def test_other_weights_stay_as_they_are(weights: list[float], draws: int):
    values = np.array(weights, np.float32)
    raw = pack_weights(values, draws)
    assert raw[:4] == F4
    assert np.array_equal(unpack(raw, "<f4"), values, equal_nan=True)


STEP = np.float32(1e-9).tobytes()


@pytest.mark.parametrize(
    ("raw", "dtype", "message"),
    [
        (None, "<f4", "expected bytes, got NoneType"),
        ("u1", "<i4", "expected bytes, got str"),
        (b"", "<i4", "expected whole numbers"),
        (b"u1", "<i4", "expected whole numbers"),
        (b"u9\0\0abc", "<i4", "expected whole numbers"),
        (F4 + b"abcd", "<i4", "expected whole numbers"),
        (U1 + b"abcd", "<f4", "expected floating-point numbers"),
        (U2 + b"abc", "<i4", "3 bytes are not a whole number of 2-byte items"),
        (U3 + b"abcd", "<i4", "4 bytes are not a whole number of 3-byte items"),
        (F4 + b"abc", "<f4", "3 bytes are not a whole number of 4-byte items"),
        (Q2 + b"ab", "<f4", "-2 bytes are not a whole number of 2-byte items"),
        (Q2 + STEP + b"abc", "<f4", "3 bytes are not a whole number of 2-byte items"),
        (Q2 + np.float32(np.nan).tobytes(), "<f4", "log-probs of scale nan"),
        (Q2 + np.float32(np.inf).tobytes(), "<f4", "log-probs of scale inf"),
        (Q2 + np.float32(-1e-9).tobytes(), "<f4", "log-probs of scale -1e-09"),
        (Q2 + np.float32(3.1e-8).tobytes(), "<f4", "expected 0 to 2.98"),
        (H1 + b"\4\0\5", "<f4", "5 hits of 4 draws"),
        (H1 + b"\0\0\0", "<f4", "expected floating-point numbers"),
        (H1 + b"\x41\0\0", "<f4", "expected floating-point numbers"),
        (H1 + b"\4\1\0", "<f4", "expected floating-point numbers"),
        (H1 + b"\4", "<f4", "expected floating-point numbers"),
        (U2 + b"\0\1", "<u1", r"numbers 256\.\.256 are not of <u1"),
        (I4 + b"\xff" * 4, "<u2", r"numbers -1\.\.-1 are not of <u2"),
    ],
)
def test_what_is_no_array_is_refused(raw: Any, dtype: str, message: str):
    with pytest.raises(ValueError, match=message):
        unpack(raw, dtype)


@given(
    st.sampled_from([U1, U2, U3, I4, F4, Q2, H1 + b"\4\0", b""]),
    st.binary(max_size=40),
    st.sampled_from(["<u1", "<u2", "<i4", "<f4"]),
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_an_array_of_that_type_or_refused(code: bytes, rest: bytes, dtype: str):
    try:
        found = unpack(code + rest, dtype)
    except ValueError:
        return
    assert found.dtype == np.dtype(dtype)
    assert found.ndim == 1


@pytest.mark.parametrize("draws", [0, 48])
def test_weights_of_atoms_take_two_bytes(draws: int):
    logp = -np.concatenate([RNG.exponential(3, 300), [1e-7, 0.0, 80.0]]).astype(np.float32)
    weights = np.exp(logp)
    weights[::7] = 0
    raw = narrow_weights(weights, draws)
    assert (raw[:4], len(raw)) == (W2, 8 + 2 * len(weights))
    found = unpack(raw, "<f4")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found == 0, weights == 0)
    some = weights > 0
    off = np.abs(np.log(found[some].astype(np.float64)) - np.log(weights[some].astype(np.float64)))
    # half a step of the root, at each log; float32's own rounding beside it
    lowest = -np.log(weights[some].min())
    step = np.sqrt(lowest * -np.log(weights[some].astype(np.float64))) / (CODES - 1)
    assert (off <= 1.01 * step + lowest / CODES**2 + 1e-5).all()
    assert 1e-5 < off.max() < 2e-3


@pytest.mark.parametrize(
    "weights",
    [[], [0.0, 0.0], [0.5, np.nan], [0.5, -0.1], [0.3, 1e-38], [0.3, 1.5], [0.3, np.inf]],
)
def test_weights_that_two_bytes_do_not_hold_stay_as_they_are(weights: list[float]):
    values = np.array(weights, np.float32)
    assert narrow_weights(values, 0) == pack_weights(values, 0)


def test_counts_stay_counts():
    weights = np.array([0.25, 0.75, 0.0], np.float32)
    assert narrow_weights(weights, 4) == pack_weights(weights, 4)


@pytest.mark.parametrize(
    "damaged",
    [W2, W2 + b"\0" * 3, W2 + b"\0" * 5, W2 + np.array([-1.0], "<f4").tobytes()],
)
def test_damaged_weights_are_refused(damaged: bytes):
    with pytest.raises(ValueError, match=r"bytes are not a whole number|of scale"):
        unpack(damaged, "<f4")
