"""What SGLang's own processor of prompts' logits makes of rows that were chosen for it."""

from typing import Any

import numpy as np
import pytest
import torch

from sglang_bridge.server.compat import logit_rows
from sglang_bridge.server.entry import offer_standins

offer_standins()
from sglang.srt.layers.logits_processor import LogitsMetadata  # noqa: E402  (needs torchvision)
from sglang.srt.layers.logprob_processor import InputLogprobProcessor  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

HIDDEN, VOCAB, OFFERED = 5, 11, 9
STATES_LH = torch.randn(OFFERED, HIDDEN, generator=torch.Generator().manual_seed(0))
HEAD_HV = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1))
# two requests of 5 and 4 rows, and the last of each is sampled from
LAST = [4, 8]


def processed(chunk: int, chosen_L: list[int] | None) -> tuple[Any, torch.Tensor, list[int]]:
    """(SGLang's result, logits to sample from, rows of each chunk); None: all, as SGLang does."""
    processor, chunks = InputLogprobProcessor(VOCAB), []
    processor.logprobs_chunk_size = chunk

    def logits_of(states_LH: torch.Tensor, head: Any, metadata: Any, **kwargs: Any) -> torch.Tensor:
        chunks.append(len(states_LH))
        return states_LH @ HEAD_HV

    rows = list(range(OFFERED))
    metadata = LogitsMetadata(
        forward_mode=ForwardMode.EXTEND,
        extend_input_logprob_token_ids_gpu=torch.zeros(OFFERED, dtype=torch.int64),
        sample_indices_cpu=LAST,
        input_logprob_indices_cpu=rows,
    )
    given: dict[str, Any] = {
        "sample_indices": torch.tensor(LAST),
        "input_logprob_indices": torch.tensor(rows),
        "token_to_seq_idx": [0] * 5 + [1] * 4,
        "lm_head": None,
        "get_logits_fn": logits_of,
        "logits_metadata": metadata,
    }
    if chosen_L is None:
        result, sampled = processor.forward(STATES_LH, **given)
    else:
        kept = np.array(chosen_L)
        result, sampled = logit_rows.computed(
            kept, InputLogprobProcessor.forward, processor, STATES_LH, **given
        )
    assert (metadata.sample_indices_cpu, metadata.input_logprob_indices_cpu) == (LAST, rows)
    return result, sampled, chunks


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("chosen", [[1, 4, 5, 6, 8], [4, 8], list(range(OFFERED))])
def test_chosen_rows_are_computed_alone_and_its_accounts_add_up(chunk: int, chosen: list[int]):
    whole, expected, _ = processed(chunk, None)
    found, sampled, chunks = processed(chunk, chosen)
    torch.testing.assert_close(sampled, expected)
    assert sum(chunks) == len(chosen)
    assert found.token_logprobs.shape == whole.token_logprobs.shape
    assert found.token_logprobs.tolist() == [0.0] * OFFERED


def test_rows_of_another_pass_are_an_error():
    with pytest.raises(RuntimeError, match="chose of 8 logit rows, SGLang offers 9"):
        processed(100, [4, 7])
