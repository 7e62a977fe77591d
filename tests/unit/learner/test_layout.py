"""How sequences become packed positions: multiples, filler, and what TransformerEngine is told."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.learner.layout import PackLayout, rank_multiple_of
from tests.support.fake_card import CARD, FakeCard

CPU = torch.device("cpu")
SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6)


def sequences(sizes: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Given and sampled tokens in every order, a given one first and a sampled one last."""
    ids, positions = [], []
    for seed, (given_tokens, sampled) in enumerate(sizes):
        length = given_tokens + sampled
        inner = np.random.default_rng(seed).permutation(np.arange(1, length - 1))
        ids.append(np.arange(length, dtype=np.int32) + 1)
        positions.append(np.sort(np.append(inner[: sampled - 1], length - 1)))
    return ids, positions


def settings_of(**fields: Any) -> Any:
    return SimpleNamespace(
        **({"fp8": None, "fp4": None, "use_transformer_engine_op_fuser": False} | fields)
    )


@pytest.mark.parametrize(
    ("fields", "multiple"),
    [
        ({}, 1),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, 128),
    ],
)
def test_what_a_rank_holds_is_a_multiple_that_fp8_accepts(fields: dict[str, str], multiple: int):
    assert rank_multiple_of(settings_of(**fields)) == multiple


@settings(deadline=None, max_examples=50)
@given(
    SIZES,
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 16, 32]),
    st.booleans(),
)
def test_every_part_of_every_rank_is_a_multiple(
    sizes: list[tuple[int, int]], tp: int, cp: int, multiple: int, fixed: bool
):
    """Whatever the layout: segments of 2 * cp, and 8 rows of an input and 16 of a product."""
    tokens = 500 if fixed else None
    for cp_rank in range(cp):
        layout = PackLayout(CPU, tp, cp, cp_rank, fixed_tokens=tokens, rank_multiple=multiple)
        rows = layout.pack(*sequences(sizes))
        own = rows.ids_1s.shape[1]
        assert own * cp == rows.total_tokens
        assert own % (tp * multiple) == 0
        lengths = rows.packing.keys.lengths
        assert sum(lengths) == rows.total_tokens
        assert all(length % layout.segment_multiple == 0 for length in lengths)
        least = sum(-(-(p + r - 1) // layout.segment_multiple) for p, r in sizes)
        least = max(tokens or 0, least * layout.segment_multiple)
        assert least <= rows.total_tokens < least + layout.total_multiple


@settings(deadline=None, max_examples=30)
@given(SIZES, st.sampled_from([1, 2]), st.sampled_from([1, 16]))
def test_filler_changes_no_token_and_no_place(sizes: list[tuple[int, int]], cp: int, multiple: int):
    ids, positions = sequences(sizes)
    inputs = [ids_S[:-1] for ids_S in ids]
    flat, predicted = np.concatenate(inputs), []
    starts = np.cumsum([0, *map(len, inputs)])[:-1]
    before_T = np.concatenate(  # of the flat inputs, the one before each sampled token
        [start + at_T - 1 for start, at_T in zip(starts, positions, strict=True)]
    )
    for cp_rank in range(cp):
        layout = PackLayout(CPU, 2, cp, cp_rank, rank_multiple=multiple)
        rows = layout.pack(ids, positions)
        real_s = rows.source_s >= 0
        assert rows.filler_1s[0].tolist() == (~real_s).tolist()
        assert rows.ids_1s[0].numpy()[real_s].tolist() == flat[rows.source_s[real_s]].tolist()
        predicted += rows.token_t.tolist()
        assert len(rows.logit_row_t) == len(rows.token_t)
        source_t = rows.source_s[rows.logit_row_t.numpy()]
        assert source_t.tolist() == before_T[rows.token_t].tolist()
    assert sorted(predicted) == list(range(sum(r for _, r in sizes)))


@pytest.mark.parametrize("tokens", [None, 500])
@pytest.mark.parametrize(("tp", "cp", "multiple"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 4, 16)])
def test_a_filler_is_as_short_as_may_be_and_predicts_a_token_on_one_rank(
    tp: int, cp: int, multiple: int, tokens: int | None
):
    predicted = 0
    for cp_rank in range(cp):
        layout = PackLayout(CPU, tp, cp, cp_rank, fixed_tokens=tokens, rank_multiple=multiple)
        rows = layout.filler()
        assert rows.is_filler
        assert not layout.pack(*sequences([(1, 1)])).is_filler
        unit = layout.total_multiple
        assert rows.total_tokens == (unit if tokens is None else -(-tokens // unit) * unit)
        assert rows.filler_1s.all()
        assert rows.filler_1s.shape == rows.ids_1s.shape
        assert (rows.source_s == -1).all()
        assert max(rows.packing.keys.lengths) == layout.segment_multiple
        predicted += len(rows.logit_row_t)
    assert predicted == 1


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_transformer_engine_is_told_of_no_padding_between_segments(cp: int):
    """Both its ways to find out say so, and neither compares values (which would wait).

    Up to 2.17 it is torch.equal of the bounds' views, and from 2.18 on whether they are the same
    object: either is answered without looking at them only if both are.
    """
    layout = PackLayout(CPU, cp=cp, engine=True)
    packing: Any = layout.pack(*sequences([(3, 4), (5, 9)])).packing
    bounds, padded = packing.cu_seqlens_q, packing.cu_seqlens_q_padded
    assert packing.cu_seqlens_kv is bounds
    assert packing.cu_seqlens_kv_padded is padded
    assert padded is (None if cp == 1 else bounds)
    assert bounds.dtype == torch.int32
    assert bounds[0] == 0
    assert bounds[-1] == layout.pack(*sequences([(3, 4), (5, 9)])).total_tokens
    assert all(length % layout.segment_multiple == 0 for length in bounds.diff().tolist())
    assert packing.max_seqlen_q == packing.max_seqlen_kv == int(bounds.diff().max())


def test_packing_waits_for_no_device():
    with FakeCard() as seen:
        for engine in (False, True):
            rows = PackLayout(CARD, tp=2, engine=engine).pack(*sequences([(3, 4), (5, 9)]))
            assert rows.ids_1s.device == CARD
    assert not seen.waits
