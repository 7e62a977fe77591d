"""Which prompt a teacher reads with the hint of another row."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.data.hint_swap import HintSwap
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.inputs.hints import make_swap
from megatron_opd.records.types import Prompt

TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def swap() -> HintSwap:
    return make_swap(TOKENIZER)


def row(uid: int, text: str, read: str | None) -> Prompt:
    ids, own = (None if t is None else np.array(TOKENIZER(t)["input_ids"]) for t in (text, read))
    assert ids is not None
    prompt = Prompt(uid, text, ids.astype(np.int32))
    return prompt if own is None else replace(prompt, teacher_ids_Q=own.astype(np.int32))


@pytest.mark.parametrize(
    "written",
    ["{hint}\n{problem}", "{problem}\nHint: {hint}\n", "<eos>{problem} ({hint}): {problem}\n"],
)
def test_the_other_rows_hint_stands_around_the_own_problem(swap: HintSwap, written: str):
    rows = [("12+30=\n", "#42"), ("4+5=\n", "#9, of course")]
    one, other = (
        row(n, problem, written.format(problem=problem.strip(), hint=hint))
        for n, (problem, hint) in enumerate(rows)
    )
    found = swap.wrong(one, other)
    assert found is not None
    assert found.dtype == np.int32
    assert swap.decode(found.tolist()) == written.format(problem="12+30=", hint="#9, of course")
    again = swap.wrong(one, one)
    assert again is not None
    assert again.tolist() == one.teacher_ids_Q.tolist()  # type: ignore[union-attr]


def test_what_cannot_be_exchanged(swap: HintSwap):
    good = row(0, "1+1=\n", "#2\n1+1=\n")
    rephrased, unhinted = row(1, "2+2=\n", "#4\ntwo and two\n"), row(2, "3+3=\n", None)
    empty = row(3, "\n", "#4\n")
    for bad in (rephrased, unhinted, empty):
        assert swap.readable(bad) is None
        assert swap.wrong(good, bad) is swap.wrong(bad, good) is None
    # ids that their text does not become again
    lossy = HintSwap(swap.decode, lambda text: swap.encode(text.lower()))
    upper = row(4, "ABC", "#1 ABC")
    assert swap.readable(upper) is not None
    assert lossy.readable(upper) is None
