"""Asks a teacher about a few responses of a batch with other hints (metrics.leak_every).

Beside the run, as rollout/beside.py says. Each response is scored three times: behind the student's
prompt, where the teacher selects ids, behind its row's own, and behind one with the hint of another
row, where it scores the same ids. metrics/hint_leak.py says what is made of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.config.roles import Role, answering
from megatron_opd.config.schema import Config
from megatron_opd.data.hint_swap import HintSwap
from megatron_opd.metrics.hint_leak import PREFIX, HintedScores, leak_problem, measure
from megatron_opd.records.seeds import LEAK, derived_seed
from megatron_opd.records.types import AnySample, Batch, IntArray, Prompt, Rollout
from megatron_opd.rollout.beside import BesideProbe, Columns, Whole, here
from megatron_opd.rollout.score_requests import behind
from megatron_opd.rollout.scorer import ChangingWeights, ScoreFleet
from sglang_bridge.errors import BadReply, BridgeError
from sglang_bridge.protocol import ScoreReply, ScoreRequest, Selection

logger = logging.getLogger(__name__)

ATOMS, DRAWS = 32, 32
"""Likeliest ids of every token that are compared, and draws that stand for the others."""


@dataclass(frozen=True, slots=True)
class Hinted:
    """Holds a response and what its teacher reads with the hint of another row, [Q] ids."""

    sample: AnySample
    wrong_ids_Q: IntArray


class HintProbe(BesideProbe):
    """Measures every so many updates how much of a hint's signal is that hint.

    Args:
        config: how often, on how many responses (metrics.leak_*).
        fleets: the servers of every teacher, or the student's where they score for it.
        swap: makes prompts with wrong hints.
        vocab_size: ids of the student, of which no more can be asked for.
        versions: of the servers whose weights change; one of them scores all three times.
        whole: returns a sample with its arrays. SamplesLost: they are gone.
    """

    def __init__(
        self,
        config: Config,
        fleets: Mapping[Role, ScoreFleet],
        swap: HintSwap,
        vocab_size: int,
        versions: Mapping[Role, ChangingWeights],
        whole: Whole = here,
    ) -> None:
        super().__init__("the hints' share", PREFIX, config.metrics.leak_every)
        self._config, self._swap, self._whole = config, swap, whole
        roles = answering(config)
        self._teachers = {name: fleets[role] for name, role in roles.items()}
        self._versions = {name: versions[role] for name, role in roles.items() if role in versions}
        self._atoms = min(ATOMS, vocab_size)
        self._last: tuple[Prompt, ...] = ()
        self._wrong_before = False

    async def measured(self, batch: Batch) -> Columns:
        """Return the figures of one response each of the first rows. Raises SamplesLost."""
        chosen = self.chosen(batch)
        answers = await asyncio.gather(*map(self._of, chosen), return_exceptions=True)
        found = [answer for answer in answers if isinstance(answer, HintedScores)]
        for answer in answers:
            if isinstance(answer, BridgeError | SamplesLost):
                self.tell_once(batch, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
        if not found:
            return {}
        columns = measure(found).columns()
        self._tell(batch, columns)
        return columns

    def chosen(self, batch: Batch) -> list[Hinted]:
        """Return one response of each of the first rows whose hint can be exchanged.

        The hint is that of the next such row of the batch and teacher; where the batch has one row
        alone, of a row of the batch that was measured before.
        """
        rows: dict[tuple[str, str], AnySample] = {}
        for sample in batch.samples:
            prompt = sample.rollout.prompt
            if prompt.teacher_ids_Q is not None and not prompt.mixture:
                rows.setdefault((prompt.teacher, prompt.text), sample)
        others = [sample.rollout.prompt for sample in rows.values()]
        found: list[Hinted] = []
        for place, sample in enumerate(rows.values()):
            if len(found) == self._config.metrics.leak_samples:
                break
            turned = (*others[place + 1 :], *others[:place], *self._last)
            wrong_ids_Q = self._wrong(sample.rollout.prompt, turned)
            if wrong_ids_Q is not None:
                found.append(Hinted(sample, wrong_ids_Q))
        self._last = tuple(others[-2:])
        return found

    def _wrong(self, prompt: Prompt, others: Sequence[Prompt]) -> IntArray | None:
        for other in others:
            if (other.teacher, other.text) == (prompt.teacher, prompt.text):
                continue
            if other.teacher == prompt.teacher:
                wrong_ids_Q = self._swap.wrong(prompt, other)
                if wrong_ids_Q is not None:
                    return wrong_ids_Q
        return None

    async def _of(self, hinted: Hinted) -> HintedScores:
        rollout = (await self._whole(hinted.sample)).rollout
        score = partial(self.score, rollout, hinted.wrong_ids_Q)
        changing = self._versions.get(rollout.prompt.teacher)
        if changing is None:
            return await score()
        scores, _ = await changing.of_one_version(score)
        return scores

    async def score(self, rollout: Rollout, wrong_ids_Q: IntArray) -> HintedScores:
        """Return what its teacher says of a response of one sequence. Raises BridgeError."""
        right_ids_Q = rollout.prompt.teacher_ids_Q
        assert right_ids_Q is not None, "chosen for its hint"
        none = np.zeros(0, np.int32)
        reply, read = await self._ask("without", rollout, None, none)
        if reply.selection is None:
            raise BadReply("a request for a selection came back without one")
        without = reply.selection
        (right, with_right), (wrong, with_wrong) = await asyncio.gather(
            self._ask("right", behind(rollout, right_ids_Q), without, without.ids_N),
            self._ask("wrong", behind(rollout, wrong_ids_Q), without, without.ids_N),
        )
        tokens = read + with_right + with_wrong
        return HintedScores(without, right.logp_N, wrong.logp_N, tokens)

    async def _ask(
        self, how: str, rollout: Rollout, of: Selection | None, ids_N: IntArray
    ) -> tuple[ScoreReply, int]:
        """Return a reply, and the tokens that were read for it. of: gives the rows of ids_N."""
        prompt, config = rollout.prompt, self._config
        empty_T1 = np.zeros(rollout.num_response_tokens + 1, np.int64)
        request = ScoreRequest(
            rid=f"{self._run_id}-leak-{how}-{prompt.uid}",
            input_ids=rollout.sequences[0],
            runs=tuple((run.start, run.stop) for run in rollout.runs),
            offsets_T1=empty_T1 if of is None else of.offsets_T1,
            ids_N=ids_N,
            temperature=config.scoring.temperature,
            num_atoms=self._atoms if of is None else 0,
            num_draws=DRAWS if of is None else 0,
            exact=True,
            seed=derived_seed(config.run.seed, LEAK, prompt.uid) if of is None else None,
        )
        reply = await self._teachers[prompt.teacher].score(request)
        return reply, len(rollout.sequences[0])

    def _tell(self, batch: Batch, columns: Columns) -> None:
        """Warn in plain words where wrong hints teach as much, once until they do not."""
        problem = leak_problem(columns)
        if problem is not None and not self._wrong_before:
            logger.warning(
                "update %d: %s; it is told once, until that is over (docs/hints.md)",
                batch.update,
                problem,
            )
        self._wrong_before = problem is not None
