"""Builds the parts of a sampler site from its configuration and its servers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_opd.buffer.delays import delay_s, stream_of
from megatron_opd.config.roles import STUDENT, Role, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.ports import TeacherScorer
from megatron_opd.data.judge import Judge
from megatron_opd.data_workers.reward import make_reward
from megatron_opd.errors import checked
from megatron_opd.inputs.models import CheckedModels
from megatron_opd.inputs.prepare import ending_of
from megatron_opd.launch.gpus import gpus_here
from megatron_opd.launch.parts import server_parts
from megatron_opd.launch.placement import Placement, place
from megatron_opd.launch.placing import in_turn
from megatron_opd.records.types import AnyRollout, AnySample, Prompt, rollout_here
from megatron_opd.rollout.generator import make_generator
from megatron_opd.rollout.scorer import make_scorer
from megatron_opd.rollout.scores import unscored
from megatron_opd.sites.absence import Patience
from megatron_opd.sites.messages import SiteHello, ToLearner, encode
from megatron_opd.sites.mirror_part import MirrorPart
from megatron_opd.sites.sampling import Finished, SiteSampling
from megatron_opd.sites.site import Site
from megatron_opd.sites.site_weights import SiteWeights
from megatron_opd.transport.samples import counted_draws
from megatron_opd.weight_sync.session import Lose, WeightSync
from megatron_opd.wire.link.ends import LinkClient
from sglang_bridge.fleet import Fleet


@dataclass(frozen=True, slots=True)
class SiteParts:
    """Holds what a site consists of besides its servers and its link."""

    site: Site
    sampling: SiteSampling
    weights: SiteWeights

    def counts(self, link: LinkClient) -> dict[str, Any]:
        """Return what the site did, for its user and for tests."""
        pulls, counts = self.weights.pulls, link.counts()
        return {
            "samples_sent": self.sampling.delivered,
            "samples_begun_anew": self.sampling.begun_anew,
            "version": self.weights.version,
            "versions_taken": self.weights.num_taken,
            "weight_bytes": 0 if pulls is None else pulls.num_bytes,
            "weights_refused": {} if pulls is None else dict(pulls.refused),
            "records_refused": dict(self.site.refused),
            "connections": counts.connections,
            "bytes_sent": counts.bytes_sent,
            "bytes_received": counts.bytes_received,
        }


class _Unscored:
    """Stands for teachers at a site that has none; the learner's site scores."""

    async def score(self, rollout: AnyRollout) -> AnySample:
        """Return the rollout without scores or reward."""
        return unscored(rollout_here(rollout))


@dataclass(frozen=True, slots=True)
class _Held:
    """Samples as schedule.in_flight says, where versions are taken meanwhile."""

    rollouts: Rollouts
    sample: Callable[[Prompt], Any]

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Sample one completion; see RolloutGenerator.generate."""
        return await self.rollouts.run(lambda: self.sample(prompt))


def placement_of_site(config: Config, roles: Sequence[Role]) -> Placement:
    """Place the servers of a site on this machine's GPUs. Raises UserError."""
    parts = server_parts({role: section_of(config, role) for role in roles})
    share = config.cluster.share_gpus
    return checked(lambda: place(parts, gpus_here(), share=share, in_turn=in_turn(config)))


def make_parts(
    config: Config,
    name: str,
    fleets: Mapping[Role, Fleet],
    models: CheckedModels,
    judge: Judge | None,
    hello: SiteHello,
    link: LinkClient,
    owner: str,
    patience: Patience,
    lose: Lose,
    say: Callable[[str], None],
) -> SiteParts:
    """Make the parts of site `name`. config: the site's own. owner: names it among all sites.

    patience: with its learner's site.
    """
    student, vocab_size, run_id = fleets[STUDENT], models.student.vocab_size, uuid.uuid4().hex[:8]
    settings, delays = config.weight_sync, config.sites.weight_delays
    directory = settings.directory
    assert directory is not None, "the configuration requires it with sites"
    ending = ending_of(config, models)
    generator = make_generator(config, student, vocab_size, run_id, ending.token_ids)
    rollouts = Rollouts(config.schedule.in_flight, student.stranded)
    scorer: TeacherScorer = _Unscored()
    if hello.scores:
        scorer = make_scorer(config, fleets, vocab_size, run_id, make_reward(judge, ending))
    part = MirrorPart(student, settings)

    async def send(message: ToLearner) -> None:
        await link.send([encode(message)])

    stream = stream_of(name, "weights")
    weights = SiteWeights(
        directory.absolute(),
        owner,
        WeightSync(student, None, part, settings, lose),
        part,
        held=rollouts.held,
        ask=send,
        serving=send,
        say=say,
        hold=lambda place: delay_s(delays, config.run.seed, stream, place),
    )

    async def deliver(finished: Finished) -> None:
        await site.deliver(finished)

    sampling = SiteSampling(
        _Held(rollouts, generator.generate),
        scorer,
        slots=config.rollout.concurrency,
        score_slots=config.scoring.concurrency,
        vocab_sizes={
            teacher: models.models[role].vocab_size
            for teacher, role in teacher_roles(config).items()
            if hello.scores
        },
        num_draws=counted_draws(config.estimator.support),
        ready=weights.ready,
        send=deliver,
    )
    site = Site(link, hello, sampling, weights, say, patience)
    return SiteParts(site, sampling, weights)
