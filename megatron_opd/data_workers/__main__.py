"""Runs one data worker of a run, started by the run.

python -m megatron_opd.data_workers CONFIG.yaml --controller tcp://HOST:PORT --index I --host H
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.data.judge import Judge
from megatron_opd.data_workers.under_way import Playroom
from megatron_opd.data_workers.worker import ControllerGone, Worker
from megatron_opd.errors import RunFailed, UserError, checked
from megatron_opd.inputs.environments import playing, turn_encoder
from megatron_opd.inputs.models import check_models, ending_of
from megatron_opd.inputs.prepare import make_judge
from megatron_opd.inputs.rendering import template_of_run, with_template
from megatron_opd.inputs.tokenizers import load_tokenizer
from megatron_opd.inputs.verifiers import judging
from megatron_opd.transport.samples import counted_draws
from megatron_opd.wire.keys import RankKeys, rank_keys
from sglang_bridge import open_files
from sglang_bridge.lifetime import die_with_parent

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of a worker's arguments."""
    parser = argparse.ArgumentParser(prog="python -m megatron_opd.data_workers")
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("--controller", required=True, metavar="tcp://HOST:PORT")
    parser.add_argument("--index", type=int, required=True, help="which of workers.count it is")
    parser.add_argument("--host", required=True, help="where learner ranks reach it")
    return parser


def main() -> int:
    """Run the worker. Exit code: 0 done, 1 failed, 2 bad input (one line on stderr)."""
    arguments = build_parser().parse_args()
    die_with_parent()
    open_files.raise_limit()
    try:
        config = load_config(Config, arguments.config, [])
        keys = rank_keys(config.run.dir)
        if keys is None:
            raise ValueError(f"{config.run.dir} has no keys: a data worker is started by its run")
        worker = (arguments.controller, arguments.index, arguments.host, keys)
        asyncio.run(_run(worker, config))
    except (ValueError, UserError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    except (ControllerGone, RunFailed) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return 0


def judge_of(config: Config) -> Judge | None:
    """Make the judge of a run as its controller does. UserError."""
    tokenizer = load_tokenizer(config.student.model, "student.model")
    return checked(lambda: make_judge(config, tokenizer))


async def _run(worker: tuple[str, int, str, RankKeys], config: Config) -> None:
    judge, draws = judge_of(config), counted_draws(config.estimator.support)
    async with judging(judge), playroom(config) as room:
        await Worker(*worker, judge, draws, room).run()


@asynccontextmanager
async def playroom(config: Config) -> AsyncIterator[Playroom | None]:
    """Keep what plays the run's trajectories, with the run's chat template. UserError.

    None: there is no environment.
    """
    if config.environment is None:
        yield None
        return
    template = template_of_run(config.run.dir)
    models, _ = with_template(config, check_models(config), template)
    async with playing(config, turn_encoder(config, models), None, {}) as plays:
        assert plays is not None, "there is an environment"
        ending, name = ending_of(config, models), uuid.uuid4().hex[:8]
        yield Playroom(config, plays, models.student.vocab_size, ending, name)


if __name__ == "__main__":
    sys.exit(main())
