"""Follows a column that a server records from the sampler to the loss; prints what arrives.

Run in a tree to which tests/unit/records/test_columns.py has added `peak_T`.
"""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from megatron_opd.batching.checks import check_batch
from megatron_opd.batching.shares import shares
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.controller.snapshot import NOTHING_YET, place
from megatron_opd.controller.snapshot_codec import decode_state, encode_state
from megatron_opd.learner.layout import PackLayout
from megatron_opd.learner.micro_batch import distil_micros
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Batch, Prompt, Sample, VersionSpan
from megatron_opd.transport.frames import from_frames, to_frames
from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.parse import parse_rollout
from sglang_bridge.protocol import DrawCache, RolloutRequest
from sglang_bridge.server import draws
from sglang_bridge.server.compat import batches, ranks

VOCAB, PATH = 50, ((3, 9), (7, 1))


def replies() -> list[DrawCache]:
    """What a client parses of two requests of two tokens that a server has sampled."""
    ranks.weight_version = lambda: "0"
    ranks.is_deterministic = lambda: False
    params = SimpleNamespace(custom_params={wire.NUM_DRAWS: 4})
    requests: list[Any] = [SimpleNamespace(sampling_params=params) for _ in PATH]
    batch, observer = SimpleNamespace(reqs=requests), draws.DrawObserver("cpu", 0)
    info = SimpleNamespace(
        temperatures=torch.ones(len(PATH), 1),
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
    )
    for token, ids in enumerate(zip(*PATH, strict=True)):
        logits_BV = torch.zeros(len(PATH), VOCAB)
        logits_BV[:, 0] = torch.tensor([1.0, 2.0]) + token
        with draws.sampling_step(draws.step_of(batch)):
            state = observer.before_grammar(logits_BV, info)
            draws.show_probabilities(logits_BV.softmax(1))
            rows = observer.after_sample(state, torch.tensor(ids))
        commit = SimpleNamespace(output_index=token)
        rows.copy_to_host(lambda tensor: tensor).consume(batch, [commit] * len(PATH))
    return [_parsed(req, list(ids)) for req, ids in zip(requests, PATH, strict=True)]


def _parsed(req: Any, ids: list[int]) -> DrawCache:
    payload = batches.find_record(req, draws.RECORD).payload()
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "cached_tokens": 0}
    meta |= {wire.PAYLOAD: [{wire.DRAWS: payload}]}
    request = RolloutRequest(rid="r", input_ids=[1], max_new_tokens=2, num_draws=4)
    found = parse_rollout(
        "http://a", {"output_ids": pack(np.array(ids)), "meta_info": meta}, request
    ).draws
    assert found is not None
    return found


def main() -> None:
    """Send the samples through checkpoint, wire and micro-batch."""
    samples = [
        Sample(
            single_turn(
                Prompt(uid, "", np.array([1], np.int32)),
                np.array(PATH[uid], np.int32),
                cached,
                (VersionSpan(0, 0, 2),),
                "stop",
                0.0,
                1.0,
            ),
            cached.sampler_logp_N,
        )
        for uid, cached in enumerate(replies())
    ]
    line = [place(sample) for sample in samples]
    state = msgspec.structs.replace(NOTHING_YET, admitted=2, next_uid=2, line=line)
    kept = [member.sample for member in decode_state(encode_state(state)).line]
    config = LearnerConfig(dtype="float32")
    batch = Batch(0, 0, tuple(sample for sample in kept if sample is not None))
    (share,) = shares(batch, config, Estimator(), 1)
    sent = from_frames(0, 0, share.plan, [memoryview(bytes(f)) for f in to_frames(share)])
    check_batch(sent, vocab_size=VOCAB, num_experts=0, sampled=True)
    (micro,) = distil_micros(sent, 0, PackLayout(torch.device("cpu")))
    cache: Any = micro.cache(micro.loss_input.draws.sampler_logp_N, prox_is_student=False).wide()
    print(json.dumps({"dtype": str(cache.peak_T.dtype), "peak_T": cache.peak_T.tolist()}))  # noqa: T201


if __name__ == "__main__":
    main()
