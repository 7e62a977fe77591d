"""Prints the progress of `opd sft` and writes its metrics file."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

from megatron_opd.config.sft import SftConfig

PROGRESS_LINES = 100


@dataclass(frozen=True)
class SftRow:
    """Holds one update. update: 1-based, 0 before the first. Losses in nats per response token."""

    update: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    response_tokens: int = 0
    validation_loss: float | None = None


class SftReport:
    """Prints a progress line now and then and every validation, and writes a row per update.

    shown: false on ranks that print nothing.
    """

    def __init__(self, config: SftConfig, *, shown: bool) -> None:
        self._updates, self._path, self._shown = config.run.max_steps, config.metrics, shown
        self._every = max(1, self._updates // PROGRESS_LINES)
        self._started_s, self._tokens = time.perf_counter(), 0
        if shown and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("", encoding="utf-8")

    def __call__(self, row: SftRow) -> None:
        """Print and write one update's figures."""
        if not self._shown:
            return
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        self._tokens += row.response_tokens
        validated = row.validation_loss is not None
        if validated or row.update == 1 or row.update % self._every == 0:
            self.say(self._line(row))

    def say(self, line: str) -> None:
        """Print a line on the terminal, unless this rank is silent."""
        if self._shown:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _line(self, row: SftRow) -> str:
        parts = [f"sft update {row.update}/{self._updates}"]
        if row.loss is not None and row.grad_norm is not None:
            rate = self._tokens / (time.perf_counter() - self._started_s)
            parts.append(f"loss {row.loss:.4f}  grad_norm {row.grad_norm:.3f}")
            parts.append(f"response_tokens_per_s {rate:.0f}")
        if row.validation_loss is not None:
            parts.append(f"validation_loss {row.validation_loss:.4f}")
        return "  ".join(parts)
