"""Holds the learner: a Megatron-Core model and its optimizer; it trains and exports them.

Invariant: every rank of the world calls the same methods in the same order with plans of the same
shape, since each of them holds collectives.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from megatron_opd.checkpoint.convert import load_weights, source_of
from megatron_opd.checkpoint.export import export_hf
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.balancing import Balancing
from megatron_opd.learner.devices import cpu
from megatron_opd.learner.forward import (
    distil_loss,
    path_logp,
    run_mini_batch,
    sft_loss,
)
from megatron_opd.learner.layout import rank_multiple_of
from megatron_opd.learner.learning_rate import learning_rate
from megatron_opd.learner.micro_batch import DistilMicro, SftMicro, distil_micros
from megatron_opd.learner.model import DTYPES, build_model
from megatron_opd.learner.optimizer import (
    build_optimizer,
    connect_pipeline_schedule,
    set_learning_rate,
)
from megatron_opd.learner.passes import ForwardPasses, compared_only, own_gates
from megatron_opd.learner.routing import Routing
from megatron_opd.learner.scores import whole_batch
from megatron_opd.learner.student_logp import make_student_logp
from megatron_opd.learner.totals import Mismatch, Totals
from megatron_opd.learner.world import World, init_world
from megatron_opd.losses.reduction import count_of
from megatron_opd.losses.weights import read_by_any
from megatron_opd.metrics.mismatch_gap import Bound, ModelsDiffer
from megatron_opd.models.gather import FullTensors
from megatron_opd.models.spec import read_model_spec
from megatron_opd.records.columns import RankInputs
from megatron_opd.sizing.flops import PEAK_BF16_TFLOPS, Work, mfu, train_flops
from megatron_opd.transport.messages import LearnerInfo, Replay, Scores, UpdateMetrics

NumberT = TypeVar("NumberT", int, float)


class NotFinite(RuntimeError):
    """Reports a NaN or infinite loss or gradient, after which the run cannot continue."""


@dataclass(frozen=True)
class StepResult:
    """Reports one optimizer step.

    totals: global. grad_norm: before clipping. balancing_loss: see Balancing.mean_loss.
    """

    totals: Totals
    grad_norm: float
    balancing_loss: float | None
    forward_backward_s: float
    optimizer_s: float


class MegatronLearner:
    """Loads `model` into this rank of the torchrun world and trains it.

    updates: length of the run, for the learning-rate schedule. fresh_seed: initialise from this
    seed when `model` has no weights; None makes that a ValueError. num_ids: see ModelSpec; None:
    every row of the vocabulary.
    """

    def __init__(
        self,
        model: Path,
        config: LearnerConfig,
        *,
        updates: int,
        seed: int,
        fresh_seed: int | None = None,
        num_ids: int | None = None,
    ) -> None:
        self.config, self.updates, self.source = config, updates, model
        self.spec = replace(read_model_spec(model), cut_to=num_ids)
        self.spec.check_parallel(config.parallel, uneven=config.uneven_stages)
        self._device_mode: AbstractContextManager[Any] = cpu.install()
        with self._device_mode:
            self.world: World = init_world(config.parallel, seed, config.threads, config.timeout_s)
            self.model = build_model(self.spec, self.world, config)
            weights = source_of(model, self.spec, fresh_seed)
            load_weights(self.model, self.spec, self.world, weights)
            self.head = make_student_logp(
                self.model[-1].module, config.logp, entropy=config.entropy
            )
            self.optimizer = build_optimizer(config.optimizer, self.model, DTYPES[config.dtype])
        connect_pipeline_schedule(self.model, self.optimizer)
        self.balancing = Balancing.of(self.model, sum(self.spec.moe_layers))
        self.routing = Routing.of(config, self.model, self.spec, self.world)
        megatron: Any = self.model[0].config
        self.layout = self.world.pack_layout(
            None if megatron.variable_seq_lengths else config.max_tokens_per_microbatch,
            rank_multiple_of(megatron),
        )
        self.full = FullTensors(self.model, self.spec, self.world)

    def info(self) -> LearnerInfo:
        """Return what the controller needs to know."""
        return LearnerInfo(
            world_size=self.world.size,
            data_parallel_size=self.world.parallel.dp,
            parameters=sum(math.prod(shape) for _, shape, _ in self.full.manifest()),
            vocab_size=self.spec.num_ids,
            dtype=self.config.dtype,
            backend=dist.get_backend(),
            device=str(self.world.device),
        )

    def train(
        self,
        batch: RankInputs,
        estimator: Estimator,
        temperature: float,
        *,
        truncated_sampler: bool = False,
        bound: Bound | None = None,
    ) -> UpdateMetrics:
        """Make one learner update: `batch.plan`'s mini-batches, an optimizer step each.

        batch: a RankBatch on ranks of the last stage; see reading.py for who has what.
        temperature: the sampler's. truncated_sampler: it renormalises over a part of the vocabulary
        (top_p < 1), so that its probabilities are no measure of the learner's; the mismatch is not
        measured then. bound: what the mismatch may be; None: anything. ModelsDiffer: it is more,
        and no optimizer step was made. NotFinite: see there.
        """
        lr = learning_rate(self.config.optimizer, batch.update, self.updates)
        minis = [
            distil_micros(batch, mini, self.layout, self.routing) for mini in range(len(batch.plan))
        ]
        recorded = self.config.routing_replay == "current"
        start = self.config.score_start or estimator.applied_correction.prox
        passes = ForwardPasses(
            self.model, self.world, self.head, estimator, temperature, start, recorded
        )
        with self._device_mode:
            minis = passes.with_prox(minis)
            compares = not truncated_sampler and self._compares_routing(batch.update)
            free = passes.mismatch_without_replay(minis[0]) if compares else None
        steps: list[StepResult] = []
        for index, mini in enumerate(minis):
            with self._device_mode:
                micros = passes.with_m2_limits(mini)
            count = _count_of_mini(batch, index, estimator)
            loss = partial(
                distil_loss,
                head=self.head,
                estimator=estimator,
                temperature=temperature,
                measure_mismatch=index == 0 and not truncated_sampler,
                scores_start=start,
            )
            run = partial(run_mini_batch, self.model, self.head, micros, loss)
            if index == 0 and bound is not None:
                run = partial(_bounded, run, bound)
            steps.append(self._step(run, lr, count, micros))
        samples = round(self._sum_over_data(float(batch.share_B.sum())))
        metrics = self._metrics(batch.update, lr, steps, samples, start, free)
        return self._with_speed(metrics, batch)

    def score(self, batch: RankInputs, temperature: float, *, replay: Replay) -> Scores:
        """Return the log-prob of every sampled token, as `train` on this batch computes them.

        That is without learning, and the whole batch as one mini-batch. Collective; the same on
        every rank. ValueError: the sampler's weights are asked for, and this learner reads none.
        """
        if replay == "gates" and not self.config.replays_gates:
            raise ValueError("learner.routing_weights must be sampler to replay gates, got learner")
        micros = distil_micros(batch, 0, self.layout, self.routing)
        if replay == "off":
            micros = [compared_only(micro) for micro in micros]
        elif replay == "experts":
            micros = [own_gates(micro) for micro in micros]
        with self._device_mode:
            found, totals = path_logp(self.model, micros, self.world, self.head, temperature)
            totals = totals.on_host()
            logp_T = whole_batch(found, batch, self.world)
        return Scores(
            logp_T=logp_T.astype("<f4").tobytes(),
            routing_choices=int(totals.sum("routing_choices")),
            routing_choices_moved=int(totals.sum("routing_choices_moved")),
        )

    def _compares_routing(self, update: int) -> bool:
        """Return whether the update also measures the mismatch without replay."""
        every = self.config.routing_compare_every
        return every > 0 and update % every == 0

    def sft_step(self, micros: Sequence[SftMicro], update: int) -> StepResult:
        """Make one supervised optimizer step."""
        lr = learning_rate(self.config.optimizer, update, self.updates)
        loss = partial(sft_loss, head=self.head)
        count = sum(len(micro.response_T) for micro in micros)
        run = partial(run_mini_batch, self.model, self.head, micros, loss)
        return self._step(run, lr, count, micros)

    def sft_loss(self, micros: Sequence[SftMicro]) -> Totals:
        """Return the loss of supervised micro-batches, without learning from them. Collective."""
        loss = partial(sft_loss, head=self.head)
        with self._device_mode:
            for chunk in self.model:
                chunk.eval()
            totals = run_mini_batch(
                self.model, self.head, micros, loss, self.world, forward_only=True
            )
            for chunk in self.model:
                chunk.train()
        return totals.on_host()

    def finish_param_gather(self) -> None:
        """Make every parameter current on every rank; call before weights are read. Collective.

        With overlap_param_gather an optimizer step leaves them to be gathered by the next forward.
        """
        with self._device_mode:
            for chunk in self.model:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.disable_forward_pre_hook(param_sync=True)
                    chunk.enable_forward_pre_hook()

    def export_hf(
        self,
        target: Path,
        dtype: torch.dtype,
        may_write: Callable[[], None] = lambda: None,
        chat_template: str | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """Write the current weights as a Hugging Face checkpoint. Collective; rank 0 writes.

        may_write: called before the first byte and before the name; what it raises stops the rest.
        chat_template: in place of the source's. end_ids: named in its generation_config.json
        besides.
        """
        self.finish_param_gather()
        if self.world.rank == 0:
            may_write()
            export_hf(
                self.full.tensors(),
                self.source,
                target,
                dtype,
                may_name=may_write,
                chat_template=chat_template,
                end_ids=end_ids,
            )
        else:
            for _ in self.full.tensors():
                pass
        dist.barrier()

    def _step(
        self,
        forward_backward: Callable[[World], Totals],
        lr: float,
        count: float,
        micros: Sequence[SftMicro | DistilMicro],
    ) -> StepResult:
        """Make one step. count: this rank's part of the loss's count. micros: its micro-batches."""
        started = time.perf_counter()
        losses, balancing = 0, None
        with self._device_mode:
            if self.balancing is not None:
                fillers = sum(micro.rows.is_filler for micro in micros)
                losses = self.balancing.weigh(count, len(micros), fillers)
            totals = forward_backward(self.world).on_host()
            if self.balancing is not None:
                balancing = self.balancing.mean_loss(losses)
            if not math.isfinite(totals.sum("loss")):
                raise NotFinite(f"the loss is {totals.sum('loss')}")
            middle = time.perf_counter()
            set_learning_rate(self.optimizer, lr)
            result: Any = self.optimizer.step()
            norm: float | None = result[1]
        if norm is None or not math.isfinite(norm):
            raise NotFinite(f"the gradient norm is {norm}")
        ended = time.perf_counter()
        return StepResult(totals, float(norm), balancing, middle - started, ended - middle)

    def _sum_over_data(self, value: NumberT) -> NumberT:
        """Sum over data-parallel ranks; ranks that share sequences count once."""
        if self.world.size == 1:
            return value
        own, kind = value * self.world.is_head, type(value)
        dtype = torch.float64 if kind is float else torch.int64
        count = torch.full((), own, dtype=dtype, device=self.world.device)
        dist.all_reduce(count)
        return kind(count)

    def _with_speed(self, metrics: UpdateMetrics, batch: RankInputs) -> UpdateMetrics:
        """Add the update's model FLOPs (sizing/flops.py) over the time of its optimizer steps.

        Other forward passes (learner/passes.py) count neither as FLOPs nor as time.
        """
        given_B = batch.length_B - batch.response_B
        lengths = zip(given_B.tolist(), batch.response_B.tolist(), strict=True)
        # In millions: those of a big batch are no int64.
        mflops = self._sum_over_data(
            train_flops(self.spec, Work.of(lengths, self.spec.window)) // 10**6
        )
        seconds = metrics.forward_backward_s + metrics.optimizer_s
        cuda = self.world.device.type == "cuda" and self.config.dtype == "bfloat16"
        peak = PEAK_BF16_TFLOPS.get(torch.cuda.get_device_name()) if cuda else None
        return msgspec.structs.replace(
            metrics,
            tflops_per_rank=mflops / 1e6 / seconds / self.world.size,
            mfu=mfu(1e6 * mflops, seconds, self.world.size, peak),
        )

    def _peak_rss_bytes(self) -> int:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.world.size == 1:
            return own
        peak = torch.full((), own, device=self.world.device)
        dist.all_reduce(peak)
        return int(peak)

    def _metrics(
        self,
        update: int,
        lr: float,
        steps: Sequence[StepResult],
        samples: int,
        start: bool,
        free: Mismatch | None,
    ) -> UpdateMetrics:
        totals = steps[0].totals
        for step in steps[1:]:
            totals = totals.plus(step.totals)
        mismatch = totals.mismatch()
        importance, spread = totals.moments("importance")
        kappa, kappa_spread = totals.moments("correction")
        trust, trust_spread = totals.moments("trust")
        squared = totals.mean("importance_squared", "importance_weight")
        shift = totals.mean("advantage_shift", "advantage_responses")
        return UpdateMetrics(
            update=update,
            loss=totals.mean("loss", "count") or 0.0,  # where all responses are masked
            reverse_kl_nats=totals.mean("reverse_kl", "reverse_kl_tokens"),
            forward_kl_nats=totals.mean("forward_kl", "forward_kl_tokens"),
            entropy_nats=totals.mean("entropy", "entropy_tokens"),
            grad_norm=steps[-1].grad_norm,
            balancing_loss=steps[-1].balancing_loss,
            lr=lr,
            num_response_tokens=int(totals.sum("tokens")),
            num_ids=int(totals.sum("ids")),
            num_samples=samples,
            probs_diff_max=mismatch.max_abs_dp,
            probs_diff_mean=mismatch.mean_abs_dp,
            mismatch_tokens=mismatch.gap.tokens,
            mismatch_k3_nats=mismatch.mean_k3_nats,
            probs_diff_free_max=free.max_abs_dp if free else None,
            probs_diff_free_mean=free.mean_abs_dp if free else None,
            routing_moved_fraction=totals.mean("routing_moved", "routing_pairs"),
            ratio_p50=totals.ratio_quantile(0.5),
            ratio_p99=totals.ratio_quantile(0.99),
            ratio_max=math.exp(totals.max("log_ratio")),
            sampler_k1_nats=totals.mean("k1", "tokens"),
            sampler_k2_nats=totals.mean("k2", "tokens"),
            sampler_k3_nats=totals.mean("k3", "tokens"),
            prox_k1_nats=totals.mean("prox_k1", "tokens") if start else None,
            prox_k1_weighed_nats=totals.mean("prox_k1_weighed", "tokens") if start else None,
            sampler_start_k1_nats=totals.mean("start_k1", "tokens") if start else None,
            sampler_start_k3_nats=totals.mean("start_k3", "tokens") if start else None,
            importance_mean=importance,
            importance_variance=spread,
            correction_mean=kappa,
            correction_variance=kappa_spread,
            trust_ratio_mean=trust,
            trust_ratio_variance=trust_spread,
            effective_sample_fraction=importance**2 / squared if importance and squared else None,
            advantage_error=None if shift is None else abs(shift),
            truncated_fraction=totals.mean("cut_weight", "importance_weight"),
            stopped_fraction=totals.mean("stopped_weight", "importance_weight"),
            excluded_ids=int(totals.sum("excluded_ids")),
            forward_backward_s=sum(step.forward_backward_s for step in steps),
            optimizer_s=sum(step.optimizer_s for step in steps),
            peak_rss_bytes=self._peak_rss_bytes(),
        )


def _bounded(run: Callable[[World], Totals], bound: Bound, world: World) -> Totals:
    """Return the totals of `run`, the same on every rank. ModelsDiffer: they exceed the bound.

    A loss that is no number is left to who looks at it next.
    """
    totals = run(world).on_host()
    gap = totals.mismatch().gap
    if math.isfinite(totals.sum("loss")) and not bound.allows(gap):
        raise ModelsDiffer(gap)
    return totals


def _count_of_mini(batch: RankInputs, mini: int, estimator: Estimator) -> float:
    """Return this rank's part of what the loss of a mini-batch is divided by."""
    sequences = [index for micro in batch.plan[mini] for index in micro]
    read_B: Any = read_by_any(estimator, batch)[sequences]
    tokens = int(batch.response_B[sequences][read_B].sum())
    return count_of(estimator.reduction, tokens, float(batch.share_B[sequences][read_B].sum()))
