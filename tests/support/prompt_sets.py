"""Makes what is read of prompt files, without files."""

from collections.abc import Sequence
from pathlib import Path

from megatron_opd.data.drawn import RowPrompts
from megatron_opd.data.outcomes import RowOutcome, RowTally
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.prompts import PromptSet
from megatron_opd.data.records import Columns
from megatron_opd.records.types import Prompt

RULES = PromptRules(Columns(("prompt",)), 9)


def prompt_set(path: str, prompts: Sequence[Prompt], *, whole: bool = True) -> PromptSet:
    """Return a file of these prompts, of which all texts were looked for."""
    found = tuple(prompts)
    tally = RowTally(Path(path), RULES, [prompt.text for prompt in found])
    for prompt in found:
        tally.add(RowOutcome(f"{path}:1", {"prompt": prompt.text}, prompt.token_ids_P))
    return PromptSet(Path(path), found, tally, whole, found)


class DrawnOnly(RowPrompts):
    """Holds prompts in place of rows, None for a row that cannot be used."""

    num_bytes = 10**9

    def __init__(self, path: str, prompts: Sequence[Prompt | None]) -> None:
        self._prompts = prompts
        self.tally = RowTally(Path(path), RULES)

    def __len__(self) -> int:
        return len(self._prompts)

    def read(self, numbers: Sequence[int]) -> list[RowOutcome]:
        """Return what there is to know of each row: nothing."""
        return [RowOutcome("") for _ in numbers]

    def taken(self, number: int, outcome: RowOutcome) -> Prompt | None:
        """Return the prompt."""
        return self._prompts[number]


def drawn_set(path: str, prompts: Sequence[Prompt | None]) -> PromptSet:
    """Return a file whose rows are read when they are drawn, none of which was yet."""
    drawn = DrawnOnly(path, prompts)
    examples = tuple(prompt for prompt in prompts if prompt is not None)
    return PromptSet(Path(path), drawn, drawn.tally, False, examples[:2])
