"""What it brings that a waiting trajectory holds no slot of a server, and the prefix cache's share.

    python -m benchmarks tool_waits [--rounds N]

Two servers of the demo's student sample trajectories of three turns, played as in a run: turns by
rollout/trajectories.py, the environment in processes of its own. It answers after as long as a turn
takes to be sampled, measured before. Side by side, on the same prompts, seeds and slots:
trajectories that hold a slot for their turns alone, and the same which keep it while the
environment answers (at most as many trajectories at once as there are slots). The control answers
at once: there the two are alike. Caches are flushed before every round. Prefix: of the ids that
came before a second or later turn, up to the end of the turn before it, those that the server had
in its cache; its control lets any server take any turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.prompts import load_prompts
from megatron_opd.data.records import Columns
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.play import Played, TurnSample, TurnSampler
from megatron_opd.environments.playing import Playing
from megatron_opd.environments.protocol import EnvironmentRow, TrajectoryEnd
from megatron_opd.inputs.environments import playing, turn_encoder
from megatron_opd.inputs.models import check_models
from megatron_opd.records.types import Prompt, Rollout
from megatron_opd.rollout.generator import RolloutGenerator, TurnFleet
from megatron_opd.rollout.trajectories import TrajectoryGenerator
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.server.spec import ServerSpec

CONFIG = Path("examples/arithmetic/demo.yaml")
RULES = PromptRules(Columns(("prompt",)), max_tokens=64)
STARTUP_S = 400.0
SERVERS, SLOTS, TURNS = 2, 8, 3
IN_FLIGHT, TRAJECTORIES = 32, 64
ROUNDS = 3
MOST_TOKENS = 480
"""Of a trajectory: the demo's student has a context of 512."""
LEAST_RATIO, LEAST_CACHED = 1.3, 0.9


class Waiting:
    """Answers a turn after some seconds, and ends after the last. Made in a process of its own."""

    def __init__(self, answer_s: float) -> None:
        self._answer_s, self._turns = answer_s, 0

    async def start(self, row: EnvironmentRow) -> str:
        """Return the prompt."""
        assert isinstance(row.prompt, str)
        return row.prompt

    async def step(self, reply: Reply) -> str | TrajectoryEnd:
        """Return what is said to a turn."""
        await asyncio.sleep(self._answer_s)
        self._turns += 1
        return TrajectoryEnd(0.0) if self._turns == TURNS else "again"


class Uncut:
    """Plays on after a turn that was as long as a turn may be, so that all have three turns."""

    def __init__(self, inner: Playing) -> None:
        self._inner = inner

    async def play(self, row: EnvironmentRow, sample: TurnSampler) -> Played:
        """Run one trajectory; see Playing."""

        async def uncut(ids: Sequence[int], room: int, *, stop: Sequence[str] = ()) -> TurnSample:
            return TurnSample((await sample(ids, room, stop=stop)).ids)

        return await self._inner.play(row, uncut)


class AnyServer:
    """Lets any server take any turn: the control of the prefix cache."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def generate(self, request: RolloutRequest, *, prefer: str = "") -> RolloutReply:
        """Sample a turn, wherever the one before it was sampled."""
        return await self._fleet.generate(request)


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return trajectories a second with and without held slots, and shares of cached prefixes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tool_waits")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    rounds = parser.parse_args(list(options)).rounds
    config = load_config(Config, CONFIG)
    with ExitStack() as servers:
        scratch = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        processes: list[ServerProcess] = []
        for number in range(SERVERS):
            spec = ServerSpec(
                model_path=str(config.student.model),
                role="student",
                port=free_port(),
                dtype="float32",
                max_total_tokens=32768,
                mem_fraction_static=0.3,
            )
            processes.append(ServerProcess(spec, scratch / f"{number}.log"))
            servers.callback(processes[-1].stop)
            processes[-1].start()
        for process in processes:
            process.wait_ready(STARTUP_S)
        return asyncio.run(_measured([process.spec.url for process in processes], rounds))


def config_of(answer_s: float) -> Config:
    """Return the configuration of a run with this environment."""
    environment = {
        "type": f"{__name__}:Waiting",
        "arguments": {"answer_s": answer_s},
        "max_tokens": MOST_TOKENS,
    }
    sets = {
        "data.chat_template": True,
        "data.heldout": None,
        "environment": environment,
        "evaluation.problems": 0,
        "rollout.concurrency": SLOTS,
        "rollout.max_new_tokens": 48,
    }
    tree = load_config(Config, CONFIG).model_dump(mode="json", exclude_unset=True)
    for key, value in sets.items():
        section, _, name = key.partition(".")
        if name:
            tree[section][name] = value
        else:
            tree[section] = value
    return Config.model_validate(tree)


class Bench:
    """Samples rounds of trajectories on the servers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        config = config_of(0.0)
        self._models = check_models(config, teachers=False)
        tokenizer = self._models.tokenizer
        assert tokenizer is not None, "the demo's student has a tokenizer"
        prompts = load_prompts(config.data.train[0].path, tokenizer, RULES).prompts
        found = [prompts[number] for number in range(TRAJECTORIES)]
        self._prompts = [prompt for prompt in found if prompt is not None]

    async def round(
        self, answer_s: float, *, held: bool, again: bool = True
    ) -> tuple[float, list[Rollout]]:
        """Return the seconds of a round and what was sampled.

        held: a trajectory keeps its slot while the environment answers. again: turns go back to the
        server of the turn before.
        """
        config = config_of(answer_s)
        turns = RolloutGenerator(
            config, self._fleet, self._models.models.student.vocab_size, "benchmark", ()
        )
        fleet: TurnFleet = self._fleet if again else AnyServer(self._fleet)
        at_once = asyncio.Semaphore(SLOTS if held else IN_FLIGHT)
        await self._fleet.flush_cache()
        async with playing(config, turn_encoder(config, self._models), None, {}) as plays:
            assert plays is not None, "the configuration has an environment"
            made = TrajectoryGenerator(turns, fleet, Uncut(plays), config.run.seed)

            async def one(prompt: Prompt) -> Rollout:
                async with at_once:
                    return await made.generate(prompt)

            began_s = time.perf_counter()
            rollouts = await asyncio.gather(*map(one, self._prompts))
            return time.perf_counter() - began_s, list(rollouts)


async def _measured(urls: Sequence[str], rounds: int) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    async with Fleet([ServerClient(url, timeout_s=120) for url in urls]) as fleet:
        bench = Bench(fleet)
        await bench.round(0.0, held=True)  # warms up
        seconds, rollouts = await bench.round(0.0, held=True)
        turn_s = seconds * SLOTS / sum(len(rollout.turns) for rollout in rollouts)
        answering = await _side_by_side(bench, turn_s, rounds)
        at_once = await _side_by_side(bench, 0.0, rounds)
        shares = {
            name: cached_share((await bench.round(0.0, held=False, again=again))[1])
            for name, again in (("same_server", True), ("any_server", False))
        }
    sampled = sum(rollout.num_response_tokens for rollout in rollouts)
    failed = answering["ratio"] < LEAST_RATIO or shares["same_server"] < LEAST_CACHED
    return {
        "failed": failed,
        "slots": SLOTS,
        "in_flight": IN_FLIGHT,
        "trajectories": TRAJECTORIES,
        "turns_each": TURNS,
        "tokens_a_turn": round(sampled / (TURNS * TRAJECTORIES), 1),
        "answer_s": round(turn_s, 4),
        "answering": answering,
        "answering_at_once": at_once,
        "cached_share_of_prefix": shares,
        "load_before_and_after": [round(load_before, 1), round(os.getloadavg()[0], 1)],
    }


async def _side_by_side(bench: Bench, answer_s: float, rounds: int) -> dict[str, Any]:
    """Return trajectories a second of both, round by round in turn, and the ratio's median."""
    rates: dict[str, list[float]] = {"freed": [], "held": []}
    for _ in range(rounds):
        for name, held in (("freed", False), ("held", True)):
            seconds, rollouts = await bench.round(answer_s, held=held)
            rates[name].append(round(len(rollouts) / seconds, 3))
    ratios = [freed / held for freed, held in zip(rates["freed"], rates["held"], strict=True)]
    return {
        "trajectories_per_s": rates,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(median(ratios), 3),
    }


def cached_share(rollouts: Sequence[Rollout]) -> float:
    """Return which share of the ids up to the end of the turn before was in the cache."""
    before = cached = 0
    for rollout in rollouts:
        for last, run in pairwise(rollout.runs):
            before += last.stop
            cached += min(rollout.turns[run.turn].cached, last.stop)
    return round(cached / before, 4)
