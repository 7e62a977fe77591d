"""One case of `python -m studies mismatch_grid`: one server, its responses, several learners.

python -m studies.mismatch_grid.case CASE.json

CASE.json: {config, old, learners, out}; config.student.model is the learners' checkpoint, `old`
that of the server. Every learner is compared on the same responses.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from harness.case_rows import case_main
from harness.world import fleet_of, learner_world, started_world, with_model
from megatron_opd.config.schema import Config
from megatron_opd.launch.servers import server_processes
from megatron_opd.metrics.mismatch import Comparison, compare
from megatron_opd.mismatch.measure import learner_logp, prefill_logp
from megatron_opd.models.spec import read_model_spec
from megatron_opd.records.types import FloatArray, Prompt, Rollout
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.transport.messages import Replay
from megatron_opd.transport.remote_learner import RemoteLearner
from megatron_opd.weight_sync.session import WeightSync
from megatron_opd.weight_sync.transport import transport_kind
from sglang_bridge.fleet import Fleet
from studies.mismatch_grid.cases import LEARNERS, LENGTHS, PROMPT_TOKENS, PROMPTS, SEEDS

# five responses of 1x for one of 5x to the same prompt, as TIS compares them
REPEATS = {"1x": 5, "5x": 1}
THRESHOLD = 0.1
CONTROL = "control"
REPLAYED: Mapping[str, Replay] = {"replayed": "experts", "replayed_gates": "gates"}
Tree = dict[str, Any]
Logp = list[FloatArray]


async def run(asked: Tree, scratch: Path) -> Tree:
    """Start the server, sample, score by every learner, stop everything."""
    config = Config.model_validate(asked["config"])
    servers = server_processes(with_model(config, asked["old"]), "student", scratch)
    async with started_world(servers) as up, fleet_of(config, up) as fleet:
        return await Measurement(config, fleet, scratch).of(asked["learners"])


class Measurement:
    """Holds the server's responses, sampled once its first learner has synced its weights."""

    def __init__(self, config: Config, fleet: Fleet, scratch: Path) -> None:
        self.config, self.fleet, self.scratch = config, fleet, scratch
        self.spec = read_model_spec(config.student.model)
        self.rollouts: list[Rollout] = []
        self.prefill: Logp = []
        self.control: list[Rollout] = []
        self.sampled_s = 0.0

    async def of(self, learners: Sequence[str]) -> Tree:
        """All figures."""
        found: Tree = {"learners": {}}
        self.control = await self._sample([(CONTROL, 0, 0)], "1x")
        for name in learners:
            began = time.monotonic()
            async with self._learner(name) as (config, remote):
                # the weights that the server loaded are not the learner's yet
                stale = {} if self.rollouts else await self._control(config, remote)
                await self._sync(config, remote)
                if not self.rollouts:
                    await self._sample_all()
                    found |= stale | {"sampled_s": self.sampled_s}
                    pairs = self._pairs(self._decode(), self.prefill)
                    found["decode_prefill"] = pairs
                figures = await self._compare(config, remote)
            figures["seconds"] = time.monotonic() - began
            found["learners"][name] = figures
        return found

    async def _sample_all(self) -> None:
        began = time.monotonic()
        for length in LENGTHS:
            wanted = [(length, seed, n) for seed in SEEDS for n in range(REPEATS[length])]
            self.rollouts += await self._sample(wanted, length)
        self.prefill = await prefill_logp(self.config, self.fleet, self.rollouts)
        self.sampled_s = time.monotonic() - began

    async def _sample(self, wanted: Sequence[tuple[str, int, int]], length: str) -> list[Rollout]:
        """PROMPTS responses for each (label, seed, repeat); a seed has prompts of its own."""
        rollout = self.config.rollout.model_copy(update={"max_new_tokens": LENGTHS[length]})
        config = self.config.model_copy(update={"rollout": rollout})
        name = f"grid-{secrets.token_hex(4)}"
        generator = RolloutGenerator(config, self.fleet, self.spec.vocab_size, name, ())
        asked: list[Prompt] = []
        for label, seed, repeat in wanted:
            random = np.random.default_rng(seed)
            for number in range(PROMPTS):
                ids = random.integers(10, self.spec.vocab_size, PROMPT_TOKENS).astype(np.int32)
                about = {"length": label, "seed": seed, "prompt": number}
                uid = (seed * 10 + repeat) * PROMPTS + number
                asked.append(Prompt(uid, "", ids, metadata=about))
        return list(await asyncio.gather(*(generator.generate(prompt) for prompt in asked)))

    @asynccontextmanager
    async def _learner(self, name: str) -> AsyncIterator[tuple[Config, RemoteLearner]]:
        parallel = type(self.config.learner.parallel).model_validate(LEARNERS[name])
        own = self.config.learner.model_copy(update={"parallel": parallel})
        config = self.config.model_copy(update={"learner": own})
        learner = remote, _ = learner_world(config, self.scratch, f"learner-{name}")
        async with started_world([], learner):
            yield config, remote

    async def _sync(self, config: Config, remote: RemoteLearner) -> None:
        """Version 0 again, so that every learner finds the server as the first one did."""
        kind = transport_kind(config.weight_sync)
        transport = kind.fleet_part(self.fleet, remote.move_weights, config)
        session = WeightSync(self.fleet, remote, transport, config.weight_sync)
        await session.open()
        await session.sync(0)  # compares the digests of every slice
        await session.close()

    async def _control(self, config: Config, remote: RemoteLearner) -> Tree:
        """The gap where the weights differ: no sync yet."""
        logp, *_ = await learner_logp(config, remote, self.control, 0, replay="off")
        decode = [r.draws.sampler_logp_N[r.draws.path_T] for r in self.control]
        return {"without_sync": brief(compare(decode, logp, [LENGTHS["1x"]], THRESHOLD))}

    async def _compare(self, config: Config, remote: RemoteLearner) -> Tree:
        free, choices, moved = await learner_logp(config, remote, self.rollouts, 0, replay="off")
        figures: Tree = {
            "decode": self._pairs(self._decode(), free),
            "prefill": self._pairs(self.prefill, free),
        }
        if choices:
            figures["routing"] = {"choices": choices, "free": moved}
            for kind, replay in REPLAYED.items():
                found, _, after = await learner_logp(
                    config, remote, self.rollouts, 0, replay=replay
                )
                figures[f"decode_{kind}"] = self._pairs(self._decode(), found)
                figures["routing"][kind] = after
        return figures

    def _decode(self) -> Logp:
        return [r.draws.sampler_logp_N[r.draws.path_T] for r in self.rollouts]

    def _pairs(self, p: Logp, q: Logp) -> Tree:
        """By length; `5x_start`: the first tokens of the long responses, as many as 1x has.

        1x_of_5: the largest gap of five responses of 1x to one prompt.
        """
        found: Tree = {}
        for length in LENGTHS:
            found[length] = self._by_seed(p, q, length, None)
        found["5x_start"] = self._by_seed(p, q, "5x", LENGTHS["1x"])
        largest: dict[int, dict[int, float]] = {seed: {} for seed in SEEDS}
        for rollout, p_T, q_T in zip(self.rollouts, p, q, strict=True):
            about = rollout.prompt.metadata
            if about["length"] == "1x":
                each, gap = largest[about["seed"]], np.abs(np.exp(p_T) - np.exp(q_T)).max()
                each[about["prompt"]] = max(each.get(about["prompt"], 0.0), float(gap))
        found["1x_of_5"] = {
            "max_dp": [float(np.mean(list(each.values()))) for each in largest.values()]
        }
        return found

    def _by_seed(self, p: Logp, q: Logp, length: str, first: int | None) -> Tree:
        """Figures by seed, and over all of them."""
        by_seed = []
        chosen: list[tuple[FloatArray, FloatArray]] = []
        for seed in SEEDS:
            pairs = [
                (p_T[:first], q_T[:first])
                for rollout, p_T, q_T in zip(self.rollouts, p, q, strict=True)
                if (rollout.prompt.metadata["length"], rollout.prompt.metadata["seed"])
                == (length, seed)
            ]
            chosen += pairs
            by_seed.append(_compared(pairs))
        whole = brief(_compared(chosen))
        means = [float(np.mean(each.by_response["max_dp"])) for each in by_seed]
        token_means = [each.gap.token_mean_dp for each in by_seed]
        return whole | {"max_dp": means, "mean_dp": token_means}


def _compared(pairs: Sequence[tuple[FloatArray, FloatArray]]) -> Comparison:
    p, q = zip(*pairs, strict=True)
    return compare(p, q, [max(LENGTHS.values())], THRESHOLD)


def brief(found: Comparison) -> Tree:
    """What is kept of a comparison: figures over all of its responses."""
    gap = found.gap
    return {
        "responses": gap.responses,
        "tokens": gap.tokens,
        "largest": {"median": gap.max_dp.median, "p90": gap.max_dp.p90, "max": gap.max_dp.max},
        "k1_nats": gap.k1_nats,
        "k3_nats": gap.k3_nats,
        "above": gap.above,
        "responses_above": gap.responses_above,
    }


if __name__ == "__main__":
    case_main(run)
