"""The sampler's gate weights in the learner: value and gradient, token by token in float64."""

import pytest
import torch

from megatron_opd.learner.routing import MicroRouting, with_sampled_gates

TOKENS, EXPERTS, TOPK, HIDDEN = 5, 6, 3, 4


def drawn(seed: int = 3) -> tuple[torch.Tensor, ...]:
    """Router logits, the experts used in no particular order, their outputs, the gates recorded."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.float64, generator=random)
    used = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOPK] for _ in range(TOKENS)])
    outputs = torch.randn(TOKENS, EXPERTS, HIDDEN, dtype=torch.float64, generator=random)
    gates = torch.rand(TOKENS, TOPK, generator=random).softmax(-1)
    return logits, used, outputs, gates


def own_gates(logits: torch.Tensor, used: torch.Tensor, post: bool) -> torch.Tensor:
    """[m, E] as Megatron makes them: softmax over the chosen, or over all and then chosen."""
    chosen = logits.gather(1, used).softmax(-1) if post else logits.softmax(-1).gather(1, used)
    return torch.zeros_like(logits).scatter(1, used, chosen)


def slow_gradient(
    logits: torch.Tensor, used: torch.Tensor, post: bool, slope: torch.Tensor
) -> torch.Tensor:
    """sum over k of slope_k * d own_k / d logits, by the softmax's own derivative, in loops."""
    found = torch.zeros_like(logits)
    for token in range(TOKENS):
        among = used[token].tolist() if post else list(range(EXPERTS))
        total = sum(float(logits[token, e].exp()) for e in among)
        p = {e: float(logits[token, e].exp()) / total for e in among}
        for k, expert in enumerate(used[token].tolist()):
            for other in among:
                change = p[expert] * ((expert == other) - p[other])
                found[token, other] += float(slope[token, k]) * change
    return found


@pytest.mark.parametrize("post", [True, False])
def test_value_is_the_samplers_and_gradient_the_routers(post: bool):
    logits, used, outputs, gates = drawn()
    logits.requires_grad_()
    weights = with_sampled_gates(own_gates(logits, used, post), used, gates)
    for token in range(TOKENS):
        for k in range(TOPK):
            assert float(weights[token, used[token, k]]) == float(gates[token, k])
    assert int((weights != 0).sum()) == TOKENS * TOPK
    # a loss that bends: its slope depends on where it is taken
    mixed = torch.einsum("me,meh->mh", weights, outputs)
    (gradient,) = torch.autograd.grad((mixed**3).sum(), logits)
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for k in range(TOPK):
            exact[token] += float(gates[token, k]) * outputs[token, used[token, k]]
    slope = torch.stack(
        [
            torch.stack([(3 * exact[t] ** 2 * outputs[t, used[t, k]]).sum() for k in range(TOPK)])
            for t in range(TOKENS)
        ]
    )
    expected = slow_gradient(logits.detach(), used, post, slope)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    assert float(gradient.abs().max()) > 0.1
    # control: at the router's own weights the slope is another
    own = torch.einsum("me,meh->mh", own_gates(logits, used, post), outputs)
    (elsewhere,) = torch.autograd.grad((own**3).sum(), logits)
    assert float((elsewhere - gradient).abs().max()) > 0.1


@pytest.mark.parametrize("absent", [-1.0, float("nan"), float("inf")])
def test_where_nothing_was_recorded_the_own_weights_stay(absent: float):
    logits, used, _, gates = drawn(seed=4)
    logits.requires_grad_()
    gates[1], gates[3, 2] = absent, absent
    own = own_gates(logits, used, post=True)
    weights = with_sampled_gates(own, used, gates)
    assert torch.equal(weights[1], own[1])
    assert float(weights[3, used[3, 2]]) == float(own[3, used[3, 2]])
    assert float(weights[3, used[3, 0]]) == float(gates[3, 0])
    (gradient,) = torch.autograd.grad((weights**2)[1].sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((own**2)[1].sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)


def test_float32_weights_are_kept_to_the_last_bit():
    logits, used, _, gates = drawn(seed=5)
    own = own_gates(1e3 * logits.float(), used, post=True)
    weights = with_sampled_gates(own, used, gates)
    assert torch.equal(weights.gather(1, used), gates)


def test_a_micro_batch_that_is_only_compared_weighs_nothing():
    gates = {0: torch.rand(2, 2)}
    given = {0: torch.tensor([[0, 1], [1, 0]], dtype=torch.int16)}
    micro = MicroRouting(given, torch.ones(2, dtype=torch.bool), gates=gates)
    assert micro.gates_of(0) is gates[0]
    assert micro.gates_of(1) is None
    free = MicroRouting(given, torch.ones(2, dtype=torch.bool), follows=False, gates=gates)
    assert free.gates_of(0) is None
