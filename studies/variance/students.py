"""Students at several stalenesses: the shipped student, distilled on-policy, kept along the way.

Transformers' float32 models, so that every log-prob can be enumerated; the loss and the selection
are the project's. Axes: B rollouts, S padded tokens, T response positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_opd.data.records import read_records
from studies.variance.caches import draw_caches, evaluate_caches
from studies.variance.exact import Split

Weights = dict[str, torch.Tensor]
TRAINED_ON = Split(0, 16)


@dataclass(frozen=True)
class Training:
    """The demo's task and optimizer at a constant learning rate, on-policy.

    versions: which weights are kept as old students; stalenesses: updates between old and current.
    rollouts: of every old student.
    """

    student: Path = Path("examples/arithmetic/student")
    teacher: Path = Path("examples/arithmetic/teacher")
    prompts: Path = Path("examples/arithmetic/train.jsonl")
    versions: tuple[int, ...] = (0, 16, 48)
    stalenesses: tuple[int, ...] = (1, 4, 16, 64)
    batch_size: int = 64
    rollouts: int = 256
    max_new_tokens: int = 64
    lr: float = 5e-4
    warmup_steps: int = 5
    betas: tuple[float, float] = (0.9, 0.99)
    clip_grad: float = 1.0
    support: Split = TRAINED_ON
    seed: int = 7

    @property
    def kept(self) -> frozenset[int]:
        """Versions whose weights are needed."""
        ages = (0, *self.stalenesses)
        return frozenset(version + age for version in self.versions for age in ages)


@dataclass(frozen=True)
class Rollouts:
    """Padded token ids [B, S] and which of the positions predict a response token, bool [B, S]."""

    ids_BS: torch.Tensor
    predicts_BS: torch.Tensor

    @property
    def rollout_T(self) -> torch.Tensor:
        """int64 [T]: which rollout each response position belongs to."""
        return self.predicts_BS.nonzero()[:, 0]

    @property
    def path_T(self) -> torch.Tensor:
        """int64 [T]: the token that each of these positions continued with."""
        return self.ids_BS.roll(-1, dims=1)[self.predicts_BS]

    def logits(self, model: Any) -> torch.Tensor:
        """[T, V] of the model at the response positions. Padding stands on the right: unseen."""
        return model(self.ids_BS).logits[self.predicts_BS]


class Classroom:
    """One student and its teacher."""

    def __init__(self, config: Training) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.config = config

        def load(path: Path) -> Any:
            return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()

        self.student, self.teacher = load(config.student), load(config.teacher)
        tokenizer: Any = AutoTokenizer.from_pretrained(str(config.student), local_files_only=True)
        self._eos, self._pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        rows = read_records(config.prompts, ["prompt"])
        self._prompts = [tokenizer.encode(row["prompt"]) for row in rows]
        self._generator = torch.Generator().manual_seed(config.seed)

    @torch.no_grad()
    def roll_out(self, count: int) -> Rollouts:
        """Sample responses at temperature 1 to random prompts."""
        chosen = torch.randint(len(self._prompts), (count,), generator=self._generator).tolist()
        prompts = [self._prompts[index] for index in chosen]
        widest = max(len(prompt) for prompt in prompts)
        padding = [widest - len(prompt) for prompt in prompts]
        ids_BS = torch.tensor(
            [[self._pad] * p + ids for p, ids in zip(padding, prompts, strict=True)]
        )
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=self._generator)))
        full_BS = self.student.generate(
            ids_BS,
            attention_mask=(ids_BS != self._pad).long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.config.max_new_tokens,
            eos_token_id=self._eos,
            pad_token_id=self._pad,
        )
        unpadded = [row[p:].tolist() for row, p in zip(full_BS, padding, strict=True)]
        return self._packed(unpadded, [len(prompt) for prompt in prompts])

    def _packed(self, rows: list[list[int]], prompt_lengths: list[int]) -> Rollouts:
        """Right-padded; a response ends with its first end token."""
        lengths = [
            row.index(self._eos, start) + 1 if self._eos in row[start:] else len(row)
            for row, start in zip(rows, prompt_lengths, strict=True)
        ]
        ids_BS = torch.full((len(rows), max(lengths)), self._pad)
        predicts_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
        for index, (row, start, length) in enumerate(
            zip(rows, prompt_lengths, lengths, strict=True)
        ):
            ids_BS[index, :length] = torch.tensor(row[:length])
            predicts_BS[index, start - 1 : length - 1] = True
        return Rollouts(ids_BS, predicts_BS)

    def update(self, optimizer: torch.optim.Optimizer, number: int) -> float:
        """One on-policy update of the student; the loss in nats."""
        config = self.config
        rollouts = self.roll_out(config.batch_size)
        with torch.no_grad():
            teacher_TV = rollouts.logits(self.teacher).log_softmax(-1)
        logits_TV = rollouts.logits(self.student)
        drawn = draw_caches(logits_TV.detach(), config.support, self._generator, rollouts.path_T)
        student_TV = logits_TV.log_softmax(-1)
        index = (drawn.row_N, drawn.ids_N)
        evaluation = evaluate_caches(drawn, student_TV[index], teacher_TV[index])
        loss = evaluation.loss_sum / evaluation.count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), config.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (number + 1) / config.warmup_steps)
        optimizer.step()
        return float(loss.detach())

    def train(self) -> tuple[dict[int, Weights], list[float]]:
        """(weights by version, loss of every update)."""
        config, kept = self.config, {}
        optimizer = torch.optim.AdamW(
            self.student.parameters(), lr=config.lr, betas=config.betas, weight_decay=0.0
        )
        losses: list[float] = []
        for version in range(max(config.kept) + 1):
            if version in config.kept:
                kept[version] = {n: t.clone() for n, t in self.student.state_dict().items()}
            if version < max(config.kept):
                losses.append(self.update(optimizer, version))
        return kept, losses
