"""Token ids to rewards, through a fake verifier and the built-in ones."""

import asyncio
from dataclasses import replace

from megatron_opd.config.verifier import VerifierConfig
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.judge import Judge
from megatron_opd.data.response_text import ResponseText
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.data.verifying import TaskVerifiers
from tests.support.fakes import make_prompt

TOKENIZER = build_tokenizer()
PROMPT = replace(make_prompt(0), answer="12")


def test_the_judge_cuts_at_the_first_end_token_whatever_its_text():
    # <pad> ends a response here, and the verifier knows nothing of it
    verifiers = TaskVerifiers(("arithmetic",), VerifierConfig())
    judge, ending = Judge(verifiers, "arithmetic", ResponseText(TOKENIZER.decode)), Ending((0, 1))
    right, wrong = TOKENIZER.encode("#12"), TOKENIZER.encode("\n#13")

    def reward(ids):
        return asyncio.run(judge.reward(PROMPT, ids, ending))

    assert reward([*right, 0, *wrong]) == 1
    assert reward([*right, *wrong, 0]) == 0
    assert reward(right) == 1
    assert ending.index([*right, 0, 1]) == 3
    assert ending.index(right) is None
    assert reward([]) == 0


def test_the_verifier_of_the_task_gets_text_and_answer():
    asked = []

    class Verifiers:
        async def verify(self, task, response, answer):
            asked.append((task, response, answer))
            return 0.25

    judge, ending = Judge(Verifiers(), "exact", ResponseText(TOKENIZER.decode)), Ending((1,))
    assert asyncio.run(judge.reward(PROMPT, TOKENIZER.encode("#7"), ending)) == 0.25
    assert asked == [("exact", "#7", "12")]
    no_answer, no_verifier = replace(PROMPT, answer=None), replace(PROMPT, task="none")
    assert asyncio.run(judge.reward(no_answer, [], ending)) is None
    assert asyncio.run(judge.reward(no_verifier, [], ending)) is None
    assert len(asked) == 1
    assert [judge.rewards(prompt) for prompt in (PROMPT, no_answer, no_verifier)] == [1, 0, 0]
