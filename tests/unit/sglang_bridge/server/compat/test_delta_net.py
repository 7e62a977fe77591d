"""SGLang's gated delta net in torch: chunk by chunk and token by token as transformers' in one."""

import importlib
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from sglang_bridge.server.compat import delta_net
from sglang_bridge.server.entry import STANDINS, arguments_for_device

CHANNELS, WIDTH, KEYS, VALUES, DIM_K, DIM_V = 8, 4, 2, 4, 5, 6
LENGTHS = (70, 3)  # more than a chunk of the rule; fewer tokens than the convolution is wide
SLOTS = torch.tensor([2, 0])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def test_a_convolution_goes_on_where_it_stopped():
    weight, bias = normal(CHANNELS, WIDTH), normal(CHANNELS, seed=1)
    inputs = [normal(CHANNELS, length, seed=2 + i) for i, length in enumerate(LENGTHS)]
    states = normal(3, CHANNELS, WIDTH - 1, seed=5)  # of earlier requests, to be forgotten
    untouched = states[1].clone()
    found: list[list[torch.Tensor]] = [[], []]
    cuts = ((0, 40), (40, 68)), ((0, 1), (1, 1))  # the second request waits in the second round
    for round_, fresh in ((0, True), (1, False)):
        parts = [x[:, slice(*cut[round_])] for x, cut in zip(inputs, cuts, strict=True)]
        lengths = tuple(part.shape[1] for part in parts)
        out = delta_net.convolve(
            torch.cat(parts, 1),
            weight,
            bias,
            conv_states=states,
            has_initial_state=torch.tensor([not fresh, not fresh]),
            cache_indices=SLOTS,
            query_start_loc=starts(lengths),
        )
        for mine, part in zip(found, out.split(lengths, 1), strict=True):
            mine.append(part)
    for step in range(2):
        following = torch.stack([inputs[0][:, 68 + step], inputs[1][:, 1 + step]])
        out = delta_net.convolve_next(following, states, weight, bias, conv_state_indices=SLOTS)
        for mine, row in zip(found, out, strict=True):
            mine.append(row[:, None])
    for x, mine in zip(inputs, found, strict=True):
        padded = F.pad(x[None], (WIDTH - 1, 0))
        exact = F.silu(F.conv1d(padded, weight[:, None], bias, groups=CHANNELS))[0]
        torch.testing.assert_close(torch.cat(mine, 1), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(states[1], untouched)


def test_states_go_on_from_prefill_to_decode():
    a_log, dt_bias = normal(VALUES), normal(VALUES, seed=1)
    count = sum(LENGTHS)
    sizes = [KEYS * DIM_K, KEYS * DIM_K, VALUES * DIM_V]
    mixed, a, b = (
        normal(count, sum(sizes), seed=2),
        normal(count, VALUES, seed=3),
        normal(count, VALUES, seed=4),
    )
    states = torch.zeros(3, VALUES, DIM_V, DIM_K)
    bounds = starts(LENGTHS).tolist()
    found: list[list[torch.Tensor]] = [[], []]

    def columns(rows: torch.Tensor) -> list[torch.Tensor]:
        parts = rows.split(sizes, -1)
        return [
            part.view(1, len(rows), -1, size)
            for part, size in zip(parts, (DIM_K, DIM_K, DIM_V), strict=True)
        ]

    for cuts in (((0, 30), (0, 1)), ((30, 68), (1, 1))):
        spans = [(at + x, at + y) for at, (x, y) in zip(bounds, cuts, strict=False)]
        rows = torch.cat([torch.arange(x, y) for x, y in spans])
        lengths = tuple(y - x for x, y in spans)
        out, *_ = delta_net.prefill(
            *columns(mixed[rows]),
            *delta_net.gate(a_log, a[rows], b[rows], dt_bias),
            initial_state=states,
            initial_state_indices=SLOTS,
            cu_seqlens=starts(lengths),
        )
        for mine, part in zip(found, out[0].split(lengths), strict=True):
            mine.append(part)
    for step in range(2):
        rows = torch.tensor([bounds[0] + 68 + step, bounds[1] + 1 + step])
        out = torch.empty(2, 1, VALUES, DIM_V)
        delta_net.decode(
            mixed_qkv=mixed[rows],
            a=a[rows],
            b=b[rows],
            A_log=a_log,
            dt_bias=dt_bias,
            initial_state=states,
            out=out,
            ssm_state_indices=SLOTS,
        )
        for mine, row in zip(found, out, strict=True):
            mine.append(row)
    for (start, stop), mine in zip(pairwise(bounds), found, strict=True):
        q, k, v = columns(mixed[start:stop])
        exact, _ = torch_recurrent_gated_delta_rule(
            q.repeat_interleave(VALUES // KEYS, 2),
            k.repeat_interleave(VALUES // KEYS, 2),
            v,
            g=(-a_log.exp() * F.softplus(a[start:stop] + dt_bias))[None],
            beta=b[start:stop].sigmoid()[None],
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(torch.cat(mine), exact[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("split", "order"),
    [(delta_net.split_interleaved, "by head"), (delta_net.split_stacked, "stacked")],
)
def test_projections_are_taken_apart(split, order):
    ratio = VALUES // KEYS
    q, k = normal(3, KEYS, DIM_K), normal(3, KEYS, DIM_K, seed=1)
    v, z = normal(3, VALUES, DIM_V, seed=2), normal(3, VALUES, DIM_V, seed=3)
    b, a = normal(3, VALUES, seed=4), normal(3, VALUES, seed=5)
    if order == "stacked":
        qkvz = torch.cat([x.flatten(1) for x in (q, k, v, z)], 1)
        ba = torch.cat([b, a], 1)
    else:
        by_key = [x.reshape(3, KEYS, -1) for x in (q, k, v, z)]
        qkvz = torch.cat(by_key, 2).flatten(1)
        ba = torch.cat([x.reshape(3, KEYS, ratio) for x in (b, a)], 2).flatten(1)
    mixed, gate, beta, alpha = split(qkvz, ba, KEYS, VALUES, DIM_K, DIM_V)
    assert torch.equal(mixed, torch.cat([x.flatten(1) for x in (q, k, v)], 1))
    assert torch.equal(gate, z)
    assert torch.equal(beta, b)
    assert torch.equal(alpha, a)


def test_every_name_is_sglangs_and_its_own_still_wants_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Were one of them to run on a CPU, its stand-in should go."""
    monkeypatch.syspath_prepend(STANDINS)
    modules = backend, kernels, *_ = tuple(delta_net.replaced())
    kept = {name: dict(vars(importlib.import_module(name))) for name in modules}
    with pytest.raises(Exception, match=r"driver|CUDA|Triton|triton"):
        kept[backend]["fused_gdn_gating"](
            normal(VALUES), normal(3, VALUES), normal(3, VALUES), normal(VALUES)
        )
    try:
        delta_net.answer_in_torch()
        for name in modules:
            changed = {k for k, v in vars(sys.modules[name]).items() if kept[name].get(k) is not v}
            assert changed == set(delta_net.replaced()[name])
        monkeypatch.delattr(f"{kernels}.chunk_gated_delta_rule")
        with pytest.raises(RuntimeError, match="has no chunk_gated_delta_rule"):
            delta_net.answer_in_torch()
    finally:
        for name, names in kept.items():
            vars(sys.modules[name]).update(names)


def test_a_model_with_delta_nets_gets_their_arguments(tmp_path: Path):
    for text, needed in (
        ({"linear_num_value_heads": 4}, True),
        ({"text_config": {"linear_num_value_heads": 4}}, True),
        ({"num_attention_heads": 4}, False),
        ([], False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(text))
        assert delta_net.is_needed(tmp_path) == needed
    assert not delta_net.is_needed(tmp_path / "none")
    plain = arguments_for_device([], cuda=False)
    extra = arguments_for_device([], cuda=False, has_delta_nets=True)
    assert "--disable-overlap-schedule" in extra
    assert extra[extra.index("--mamba-radix-cache-strategy") + 1] == "no_buffer"
    assert set(plain) < set(extra)
    assert arguments_for_device([], cuda=True, has_delta_nets=True) == arguments_for_device(
        [], cuda=True
    )
