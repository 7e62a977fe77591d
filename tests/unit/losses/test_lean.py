"""The blockwise log-probs against dense logits: values, every gradient, and what is held."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_opd.learner.lm_head import head_weight, install_lean_head
from megatron_opd.losses.blocks import default_block
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.passes import HeadSlice
from megatron_opd.losses.vocab_parallel import gather_logp
from tests.support.figures import bounded
from tests.support.lean_cases import case, dense, exactly, outcome


def compare(
    name: str,
    ours: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    limits: tuple[float, float],
) -> None:
    """The largest error relative to the largest entry, of values and of gradients."""
    for key, expected in exact.items():
        assert ours[key].shape == expected.shape
        if expected.numel():
            error = (ours[key] - expected).abs().max() / expected.abs().max().clamp_min(1.0)
            kind, limit = ("gradient", limits[1]) if "grad" in key else ("value", limits[0])
            bounded(f"lean, {name}: {kind}", float(error), limit, key)


@settings(deadline=None, max_examples=150)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 13), st.integers(1, 5), st.integers(0, 30)),
    block=st.tuples(st.integers(1, 10), st.integers(1, 14)),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
)
def test_equals_dense_whatever_the_blocks(
    shape: tuple[int, int, int, int], block: tuple[int, int], temperature: float
):
    given_case = case(*shape)
    ours = outcome(lean_logp, given_case, temperature=temperature, block=block)
    exact = outcome(dense, given_case, temperature=temperature)
    compare("float64", ours, exact, (1e-12, 1e-10))


def test_equals_the_dense_operation_of_the_learner():
    given_case = case(6, 40, 4, 30)
    hidden_TH, weight_vH = (t.detach().clone().requires_grad_() for t in given_case[:2])
    logits_TV = hidden_TH @ weight_vH.T
    logp_N = gather_logp(logits_TV, given_case.row_N, given_case.id_N, temperature=0.7)
    logp_N.backward(given_case.grads[0])
    lean_inputs = [t.clone().requires_grad_() for t in given_case[:2]]
    head = HeadSlice(lean_inputs[1])
    found = lean_logp(lean_inputs[0], head, given_case.row_N, given_case.id_N, temperature=0.7)
    found.logp_N.backward(given_case.grads[0])
    torch.testing.assert_close(found.logp_N, logp_N, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(lean_inputs, (hidden_TH, weight_vH), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("result", ["logp_N", "log_normaliser_T", "entropy_T"])
def test_numerical_gradient_of_each_result_alone(result: str):
    hidden_TH, weight_vH, row_N, id_N, _ = case(3, 7, 2, 6)

    def alone(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        head = HeadSlice(weight)
        return getattr(lean_logp(hidden, head, row_N, id_N, temperature=0.8, block=(2, 3)), result)

    inputs = (hidden_TH.requires_grad_(), weight_vH.requires_grad_())
    assert torch.autograd.gradcheck(alone, inputs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [(torch.float32, (1e-6, 1e-5)), (torch.bfloat16, (1e-6, 1e-2))],
    ids=["float32", "bfloat16"],
)
def test_narrower_inputs_keep_wide_sums(dtype: torch.dtype, limits: tuple[float, float]):
    """Of the same rounded inputs; only a bfloat16 gradient is rounded to bfloat16 at its end."""
    given_case = case(33, 500, 16, 200, dtype)
    ours = outcome(lean_logp, given_case, temperature=0.7, block=(8, 64))
    compare(
        str(dtype).removeprefix("torch."),
        ours,
        outcome(dense, exactly(given_case), temperature=0.7),
        limits,
    )
    hidden_TH, weight_vH, row_N, id_N, _ = given_case
    found = lean_logp(hidden_TH, HeadSlice(weight_vH), row_N, id_N)
    assert {r.dtype for r in vars(found).values()} == {torch.float32}


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_rows_of_any_sharpness(scale: float):
    """Nearly uniform, and nearly certain with logits that overflow exp."""
    given_case = case(5, 50, 3, 20)
    given_case = given_case._replace(hidden_TH=given_case.hidden_TH * scale)
    ours, exact = (outcome(f, given_case) for f in (lean_logp, dense))
    assert all(torch.isfinite(value).all() for value in ours.values())
    compare("float64", ours, exact, (1e-12, 1e-10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_main_grad_gathers_two_backward_passes(dtype: torch.dtype, main_dtype: torch.dtype):
    cases = [case(9, 30, 4, 25, dtype), case(7, 30, 4, 11, dtype)]
    weight = torch.nn.Parameter(cases[0].weight_vH.clone())
    weight.main_grad = torch.zeros_like(weight, dtype=main_dtype)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    expected = torch.zeros_like(weight, dtype=torch.float64)
    for given_case in cases:
        used, pairs = given_case._replace(weight_vH=weight), given_case[2:4]
        found = lean_logp(
            given_case.hidden_TH, HeadSlice(weight), *pairs, temperature=0.7, block=(4, 8)
        )
        found.logp_N.backward(given_case.grads[0].float())
        nothing = torch.zeros_like(given_case.grads[1])
        exact = exactly(used)._replace(grads=(given_case.grads[0], nothing, nothing))
        expected += outcome(dense, exact, temperature=0.7)["grad_weight"]
    limit = 1e-5 if main_dtype == torch.float32 else 1e-2
    error = (weight.main_grad - expected).abs().max() / expected.abs().max()  # type: ignore[attr-defined]
    bounded(f"lean, {main_dtype} main_grad: gradient", float(error), limit)
    assert weight.grad is None
    assert not vars(weight)[
        "grad_added_to_main_grad"
    ]  # the hook must still add a tied embedding's gradient


def test_only_what_needs_a_gradient_gets_one():
    given_case = case(4, 9, 3, 8)
    weight = torch.nn.Parameter(given_case.weight_vH.clone(), requires_grad=False)
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    hidden_TH = given_case.hidden_TH.clone().requires_grad_()
    lean_logp(hidden_TH, HeadSlice(weight), *given_case[2:4]).logp_N.sum().backward()
    assert hidden_TH.grad is not None
    assert not weight.main_grad.any()  # type: ignore[attr-defined]
    head = HeadSlice(weight.requires_grad_())
    lean_logp(given_case.hidden_TH, head, *given_case[2:4]).logp_N.sum().backward()
    assert weight.main_grad.any()  # type: ignore[attr-defined]


def hooked(rows: int, ids: int) -> tuple[Any, list[tuple[int, bool]]]:
    """A head under Megatron's DDP: what its hook finds in `grad`, bytes and whether it is added."""
    weight: Any = torch.nn.Parameter(case(rows, ids, 4, 1).weight_vH.clone())
    weight.main_grad = torch.zeros_like(weight)
    weight.grad_added_to_main_grad = False
    found: list[tuple[int, bool]] = []

    def hook(*_: Any) -> None:
        assert weight.grad is not None, "refused with overlap_grad_reduce"
        found.append((weight.grad.untyped_storage().nbytes(), weight.grad_added_to_main_grad))
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None

    weight.accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    weight.accumulator.register_hook(hook)
    return weight, found


def test_a_gradient_is_signalled_without_memory_and_added_once():
    """As for Megatron's fused layers; a returned zero would be copied: v * H numbers a backward."""
    rows, ids, width, block = 6, 4000, 4, (6, 50)
    given_case = case(rows, ids, width, 30)
    signalled, found = hooked(rows, ids)
    signalled.signals_main_grad = True
    plain = torch.nn.Parameter(signalled.detach().clone())
    plain.main_grad = torch.zeros_like(plain)  # type: ignore[attr-defined]
    for _ in range(2):
        for weight in (signalled, plain):
            head = HeadSlice(weight)
            logp_N = lean_logp(given_case.hidden_TH, head, *given_case[2:4], block=block).logp_N
            with _Largest() as seen:
                logp_N.sum().backward()
            copied = [size for size in seen.made if size >= weight.numel()]
            assert not copied, "a tensor of the weight's size was made"
    assert found == [(weight.element_size(), True)] * 2, "one number, seen everywhere"
    assert torch.equal(signalled.main_grad, plain.main_grad)  # type: ignore[attr-defined]


def test_a_tied_embedding_brings_its_own_gradient_to_the_hook():
    """Nobody says that the head's is the only one: then the lookup's arrives, and is added."""
    given_case = case(6, 40, 4, 30)
    weight, found = hooked(6, 40)
    hidden_TH = torch.nn.functional.embedding(torch.arange(6), weight)
    lean_logp(hidden_TH, HeadSlice(weight), *given_case[2:4]).logp_N.sum().backward()
    assert [added for _, added in found] == [False]
    alone = weight.detach().clone().requires_grad_()
    hidden_TH = torch.nn.functional.embedding(torch.arange(6), alone)
    lean_logp(hidden_TH, HeadSlice(alone), *given_case[2:4]).logp_N.sum().backward()
    torch.testing.assert_close(weight.main_grad, alone.grad)


class _Largest(TorchDispatchMode):
    """The largest number of elements that an operation has returned; made: of those in new memory.

    A view, and what is computed in place, is in memory of an argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
                if tensor.untyped_storage().data_ptr() not in known:
                    self.made.append(tensor.numel())
        return out


def test_no_tensor_is_larger_than_a_block_or_a_parameter():
    rows, ids, width, block = 64, 900, 4, (16, 100)
    given_case = case(rows, ids, width, 300)
    weight = torch.nn.Parameter(given_case.weight_vH.clone())
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    hidden_TH = given_case.hidden_TH.clone().requires_grad_()
    with _Largest() as seen:
        found = lean_logp(hidden_TH, HeadSlice(weight), *given_case[2:4], block=block)
        (found.logp_N.sum() + found.entropy_T.sum()).backward()
    assert seen.numel <= max(block[0] * block[1], weight.numel())
    with _Largest() as seen:  # the control: the dense operation is seen to hold [T, V]
        gather_logp(hidden_TH @ weight.T, *given_case[2:4]).sum().backward()
    assert seen.numel >= rows * ids


@pytest.mark.parametrize(("row", "token"), [(4, 0), (-1, 0), (0, 9), (0, -1)])
def test_a_pair_outside_the_logits_is_refused(row: int, token: int):
    hidden_TH, head = torch.zeros(4, 3), HeadSlice(torch.zeros(9, 3))
    with pytest.raises(IndexError, match=rf"lie in \[4, 9\] logits, got \({row}, {token}\)"):
        lean_logp(hidden_TH, head, torch.tensor([0, row]), torch.tensor([0, token]))


def test_a_block_on_a_device_without_a_cache_to_fit_is_bounded_by_bytes():
    for rows in (0, 1, 1000, 16_384, 500_000):
        block_rows, block_ids = default_block(torch.empty(rows, 8, device="meta"))
        assert 4 * block_rows * block_ids <= 128 * 2**20
        assert block_ids >= 2048


@pytest.mark.parametrize(
    ("setting", "value"), [("mtp_num_layers", 1), ("defer_embedding_wgrad_compute", True)]
)
def test_a_head_whose_logits_something_else_needs_is_refused(setting: str, value: Any):
    settings = {"mtp_num_layers": None, "defer_embedding_wgrad_compute": False} | {setting: value}
    model: Any = SimpleNamespace(config=SimpleNamespace(**settings), post_process=True)
    told = str(value).lower()
    with pytest.raises(ValueError, match=rf"learner\.megatron\.{setting} must be .*, got {told}"):
        install_lean_head(model)


def test_only_the_last_stage_has_a_head():
    model: Any = SimpleNamespace(post_process=False)
    with pytest.raises(ValueError, match="only the last pipeline stage holds the head"):
        head_weight(model)


@pytest.mark.parametrize("block", [(3, 5), (16, 16)])
@pytest.mark.parametrize("padding", [1, 7])
def test_rows_that_pad_the_vocabulary_do_not_exist(padding: int, block: tuple[int, int]):
    generator = torch.Generator().manual_seed(3)
    hidden_TH, weight_VH = (
        torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (6, 11)
    )
    padded_vH = torch.cat([weight_VH, torch.zeros(padding, 4, dtype=torch.float64)])
    row_N, id_N = torch.tensor([0, 2, 5, 5]), torch.tensor([10, 0, 3, 10])
    found = {}
    for name, weight, size in (("real", weight_VH, None), ("padded", padded_vH, 11)):
        inputs = hidden_TH.clone().requires_grad_(), weight.clone().requires_grad_()
        head = HeadSlice(inputs[1], vocab_size=size)
        out = lean_logp(inputs[0], head, row_N, id_N, block=block)
        (out.logp_N.sum() + out.entropy_T.sum() + out.log_normaliser_T.sum()).backward()
        found[name] = (out.logp_N, out.entropy_T, inputs[0].grad, inputs[1].grad)
    for real, padded in zip(found["real"], found["padded"], strict=True):
        torch.testing.assert_close(padded[: len(real)], real, rtol=1e-13, atol=1e-13)
    assert not found["padded"][3][11:].any()
    with pytest.raises(IndexError, match=r"\[6, 11\] logits, got \(0, 11\)"):
        lean_logp(hidden_TH, HeadSlice(padded_vH, vocab_size=11), row_N[:1], id_N[:1] + 1)
