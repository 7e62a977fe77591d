"""Fine-tunes on the distillation learner: same packing, model, optimizer and export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_opd.batching.plan import learner_plan
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.sft import SftConfig
from megatron_opd.data.answers import Example
from megatron_opd.data.examples import example_rules, read_examples
from megatron_opd.data.written_tokenizer import cut_as_written
from megatron_opd.learner.agreement import agreed_moment
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.learning_rate import learning_rate
from megatron_opd.learner.micro_batch import SftMicro, sft_micro
from megatron_opd.learner.model import DTYPES
from megatron_opd.learner.sft_report import SftReport, SftRow


def batches(examples: list[Example], batch_size: int, seed: int) -> Iterator[list[Example]]:
    """Yield batches without end; epochs are fresh permutations, a batch may span two of them."""
    rng = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch_size:
            waiting += rng.permutation(len(examples)).tolist()
        yield [examples[index] for index in waiting[:batch_size]]
        waiting = waiting[batch_size:]


def rank_micros(
    batch: list[Example], learner: MegatronLearner, config: LearnerConfig
) -> Iterator[list[SftMicro]]:
    """Yield this rank's micro-batches, a list for every mini-batch."""
    plan = learner_plan([[example.num_tokens] for example in batch], config)
    for ranks in plan:
        yield [
            sft_micro(
                [batch[index].ids_S for index in micro],
                [batch[index].position_T for index in micro],
                learner.layout,
            )
            for micro in ranks[learner.world.data_rank]
        ]


class Validation:
    """Measures the mean negative log-likelihood of held-out response tokens, in nats."""

    def __init__(self, examples: list[Example], learner: MegatronLearner) -> None:
        least = learner.config.parallel.least_samples
        if len(examples) < least:
            raise ValueError(
                "validation must hold at least learner.parallel.dp examples (times pp with vpp "
                f"above 1), got {len(examples)} and {least}"
            )
        self._learner, self._examples = learner, examples
        self._config = learner.config.model_copy(update={"num_mini_batches": 1})

    def loss(self) -> float:
        """Return the loss. Collective."""
        (micros,) = rank_micros(self._examples, self._learner, self._config)
        totals = self._learner.sft_loss(micros)
        return totals.sum("loss") / totals.sum("tokens")


def run_sft(config: SftConfig) -> None:
    """Train for `run.max_steps` updates and write the checkpoint to `config.output`.

    ValueError: bad input, before anything is trained.
    """
    from transformers import AutoTokenizer

    updates = config.run.max_steps
    learner = MegatronLearner(
        config.init,
        config.learner,
        updates=updates,
        seed=config.run.seed,
        fresh_seed=config.run.seed,
    )
    found: Any = AutoTokenizer.from_pretrained(str(config.init), local_files_only=True)
    tokenizer: Any = cut_as_written(found, config.init)
    rules = example_rules(config, tokenizer, learner.spec, agreed_moment(learner.world))
    examples = read_examples(config.train, tokenizer, rules).examples
    validation = None
    if config.validation is not None:
        held_out = read_examples(config.validation, tokenizer, rules).examples
        validation = Validation(held_out, learner)
    source = batches(examples, config.batch_size, config.run.seed)
    report = SftReport(config, shown=learner.world.rank == 0)
    if validation is not None:
        report(SftRow(0, validation_loss=validation.loss()))
    for update in range(updates):
        loss_sum, tokens, norm = 0.0, 0, 0.0
        for micros in rank_micros(next(source), learner, config.learner):
            step = learner.sft_step(micros, update)
            loss_sum += step.totals.sum("loss")
            tokens += int(step.totals.sum("tokens"))
            norm = step.grad_norm
        row = SftRow(
            update + 1,
            loss=loss_sum / tokens,
            grad_norm=norm,
            lr=learning_rate(config.learner.optimizer, update, updates),
            response_tokens=tokens,
        )
        last = update + 1 == updates
        if validation is not None and (last or (update + 1) % config.validate_every == 0):
            row = replace(row, validation_loss=validation.loss())
        report(row)
    own = tokenizer.chat_template if isinstance(config.chat_template, Path) else None
    dtype = DTYPES[config.save_dtype]
    learner.export_hf(Path(config.output), dtype, chat_template=own)
    report.say(f"wrote {config.output}")
