"""Defines the learner's section: how the model is parallelised, how it steps, where it listens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from megatron_opd.config.recompute import FEED_FORWARD, Recompute, refinement_problem
from megatron_opd.config.section import (
    OFF_IS_A_WORD,
    GpuList,
    Host,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Section,
)

Dtype = Literal["float32", "bfloat16"]
RoutingWeights = Literal["learner", "sampler"]
RoutingReplay = Annotated[Literal["off", "rollout", "current"], OFF_IS_A_WORD]


class ParallelConfig(Section):
    """Splits the learner over tp * cp * pp * dp ranks, as in Megatron-Core.

    Experts have a layout of their own over the same ranks of a pipeline stage: ep * etp of them
    hold the experts once.
    """

    tp: Processes = 1
    """Tensor-parallel ranks; sequence parallelism is on above 1. Raising it splits weights and
    activations and communicates in every layer: keep it within a node. Above the model's key-value
    heads, of which it is then a multiple, every rank also gathers the queries and keys of all."""
    cp: Processes = 1
    """Context-parallel ranks, which share the tokens of a sequence. Raising it splits activations
    of long sequences and communicates in every attention layer."""
    pp: Processes = 1
    """Pipeline stages, each with a share of the layers. Raising it splits the weights; stages idle
    at both ends of a mini-batch unless there are many micro-batches."""
    vpp: Processes = 1
    """Model chunks per pipeline stage; above 1 the pipeline is interleaved. Raising it idles less
    and communicates more."""
    dp: Processes = 1
    """Data-parallel ranks, which see different samples. Raising it shortens an update and splits
    the optimizer state; a mini-batch must hold a sample for each. Where it divides no mini-batch,
    some ranks get a sample more, and the others wait for them."""
    ep: Processes = 1
    """Expert-parallel ranks, which split the experts of an MoE model; ep * etp must divide tp * cp
    * dp. Raising it splits expert weights and exchanges tokens in every MoE layer."""
    etp: Processes | None = None
    """Tensor-parallel ranks of an expert; null: tp if ep is 1, otherwise 1. Raising it splits each
    expert's matrices."""

    @property
    def world_size(self) -> int:
        """Returns the number of learner ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def least_micros(self) -> int:
        """Returns the fewest micro-batches of a rank: interleaved, one for each stage."""
        return self.pp if self.vpp > 1 else 1

    @property
    def least_samples(self) -> int:
        """Returns the fewest samples of a mini-batch: each rank's micro-batches have one."""
        return self.dp * self.least_micros

    @property
    def expert_tp(self) -> int:
        """Returns the number of tensor-parallel ranks of an expert."""
        if self.etp is not None:
            return self.etp
        return self.tp if self.ep == 1 else 1

    @property
    def shares_experts(self) -> bool:
        """Returns whether data-parallel ranks hold experts for each other.

        They then meet in every layer of experts, not only at the end of a mini-batch.
        """
        return bool(self.tp * self.cp % (self.ep * self.expert_tp))

    @model_validator(mode="after")
    def _experts_fit(self) -> ParallelConfig:
        ranks = self.tp * self.cp * self.dp
        if ranks % (self.ep * self.expert_tp):
            raise ValueError(
                "ep * etp must divide tp * cp * dp, the ranks that hold the experts, got "
                f"ep={self.ep} * etp={self.expert_tp} and tp={self.tp} * cp={self.cp} * "
                f"dp={self.dp} = {ranks}"
            )
        return self

    @model_validator(mode="after")
    def _chunks_need_stages(self) -> ParallelConfig:
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp above 1 needs pp above 1, got vpp={self.vpp}, pp=1")
        return self


class OptimizerConfig(Section):
    """Configures AdamW, whose main parameters are float32.

    Any other key must be a field of Megatron-Core's OptimizerConfig (learner/overrides.py), such as
    optimizer_cpu_offload, use_precision_aware_optimizer or exp_avg_dtype.
    """

    model_config = ConfigDict(extra="allow")

    lr: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Peak learning rate. AdamW moves a weight by about so much an update: higher learns faster and
    diverges sooner."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate that the cosine schedule ends at; at most lr. Not used by the constant
    schedule."""
    lr_scheduler: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after warm-up: constant, or cosine down to min_lr at the last
    update."""
    warmup_steps: NonNegativeInt = 0
    """Number of updates in which the learning rate rises linearly from 0 to lr; at most
    run.max_steps. Raising it starts more gently and learns less."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of AdamW's average of gradients. Raising it smooths steps over more updates and
    reacts later."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of AdamW's average of squared gradients. Raising it makes step sizes steadier and
    slower to adapt."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator; raising it damps steps where gradients are small."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay: each update shrinks weights by lr * weight_decay. Raising it pulls
    the student away from its starting point towards 0."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; larger gradients are scaled down to it, 0: no clipping.
    Lower means smaller steps after outliers."""

    @property
    def megatron(self) -> dict[str, Any]:
        """Returns the keys that belong to Megatron-Core's OptimizerConfig."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _no_earlier_names(self) -> OptimizerConfig:
        # any other key would be taken for one of Megatron's
        for earlier, now in (("schedule", "lr_scheduler"), ("warmup_updates", "warmup_steps")):
            if earlier in self.megatron:
                raise ValueError(f"{earlier} is now {now}")
        return self

    @model_validator(mode="after")
    def _min_below_peak(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must be <= lr, got min_lr={self.min_lr}, lr={self.lr}")
        return self


UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


MismatchLimit = Annotated[Literal["refuse", "warn", "off"], OFF_IS_A_WORD]
HeadLogp = Literal["lean", "lean_eager", "dense"]


class LearnerConfig(Section):
    """Configures the Megatron-Core learner, which starts from student.model."""

    parallel: ParallelConfig = ParallelConfig()
    """How the model and the batch are split over ranks."""
    dtype: Dtype = "bfloat16"
    """Number format of weights and activations; main parameters are float32 either way. float32
    takes twice the memory and time and is exact enough for bitwise studies."""
    num_mini_batches: PositiveInt = 1
    """Number of optimizer steps per batch. Raising it learns more from each batch, off-policy: from
    the second step on, the ratio to the batch's start is no longer 1."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Packing budget of one rank's micro-batch in tokens, prompts included; a longer sample gets a
    micro-batch of its own. Raising it needs fewer passes and more activation memory."""
    recompute: Recompute = "none"
    """Which activations the backward pass computes again instead of keeping them. none: no layer's;
    selective: those of the feed-forward part of each layer, dense or experts (learner.megatron.
    recompute_modules names others); full: all but each layer's input. The later, the less memory
    and the more operations: `opd check` prints both for all three."""
    logp: HeadLogp = "lean"
    """Way to compute log-probs from the LM head. lean never holds [tokens, vocabulary]: by fused
    kernels on a GPU with Triton, else by torch's operations a block at a time; lean_eager always by
    the latter; dense holds it, and is the reference that both are checked against."""
    entropy: bool = True
    """Whether updates measure the student's entropy over the whole vocabulary (entropy_nats). lean
    alone does; false saves lean_eager two of its six passes over every block of logits."""
    routing_replay: RoutingReplay = "off"
    """Which experts the tokens of an MoE student visit in the learner. off: its own routers choose;
    rollout: the experts that the sampler used when it last computed the token (R3); current: those
    chosen at the batch's start, in all its mini-batches and recomputations. Replay brings learner
    and sampler closer and sends the experts' ids with each token. Left out in a run: rollout for a
    mixture in bfloat16, where routers of learner and sampler differ, unless its servers are started
    elsewhere (student.urls) or megatron has settings that may exclude it; else off."""
    routing_weights: RoutingWeights = "learner"
    """Whose weights scale the outputs of replayed experts. learner: those of its own routers now;
    sampler: those that the sampler used when it last computed the token, with the learner's own
    gradient; needs routing_replay: rollout. sampler brings the log-probs closer still, sends 4
    bytes for each token, layer and expert, and hides a router's changes from the forward pass."""
    routing_compare_every: NonNegativeInt = 0
    """Number of updates between measurements of the learner-sampler mismatch without replay
    (probs_diff_free_*), each of which costs one more forward pass; 0: never. Nothing is measured
    with rollout.top_p below 1."""
    score_start: bool = False
    """Scores each batch by the weights of its start even where no correction reads that
    (correction.prox): prox_k1*_nats and sampler_start_*_nats are recorded then, and no update
    changes. Costs one more forward pass of all mini-batches but the first."""
    mismatch_limit: MismatchLimit = "refuse"
    """What to do where learner and servers do not compute the same model. Before the first
    optimizer step of a run, and of a resumed one, the learner compares its probabilities of the
    tokens that its own version sampled with the servers': means beyond the limits of the number
    formats (docs/mismatch.md) end the run with refuse, print one line with warn; off compares
    nothing. Nothing is compared with rollout.top_p below 1 or weight_sync.round_to int4 or int3.
    Costs nothing, as every update measures this."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW's settings and the course of the learning rate."""
    megatron: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of Megatron-Core's TransformerConfig, such as moe_token_dispatcher_type,
    moe_aux_loss_coeff or fp8; the model's config.json and learner.parallel set the rest."""
    ddp: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of Megatron-Core's DistributedDataParallelConfig, such as bucket_size.
    overlap_grad_reduce and overlap_param_gather are true on GPUs where ranks share parameters,
    otherwise false."""
    listen_host: Host = "127.0.0.1"
    """Host name or IPv4 address on which the controller waits for the learner's ranks. Any address
    but 127.0.0.1 lets other machines connect."""
    listen_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of that address; 0 picks a free one."""
    threads: Processes | None = None
    """CPU threads per rank; null leaves torch's choice. More than the cores divided by the ranks
    slows all of them."""
    gpus: GpuList | None = None
    """GPUs of this node for the learner's ranks in their order, such as [6, 7], one for each of
    tp * cp * pp * dp. They are counted from 0, within CUDA_VISIBLE_DEVICES where that is set. null:
    laid out by itself, before the servers; `opd check` shows where. A learner that torchrun starts
    elsewhere takes what torchrun is given."""
    timeout_s: Seconds = 1800.0
    """Longest wait in seconds for one reply of the learner; then the run ends with an error. Raise
    it for large batches on slow machines."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often within an hour the learner is started again after a rank was lost or hung. The run
    continues from its last checkpoint, or from its beginning where there is none; the servers stay
    up. A learner that was started elsewhere is not started but awaited. 0: never. Raising it
    outlasts machines that fail again and again."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU in GiB (79 for an 80 GB H100, 139 for an H200): `opd check` rejects what
    cannot fit; null: it only prints what is needed."""

    @model_validator(mode="after")
    def _compares_a_replay(self) -> LearnerConfig:
        if self.routing_compare_every and self.routing_replay != "rollout":
            raise ValueError(
                "routing_compare_every must be 0 unless routing_replay is rollout, "
                f"got {self.routing_compare_every} and {self.routing_replay}"
            )
        return self

    @model_validator(mode="after")
    def _weighs_a_replay(self) -> LearnerConfig:
        if self.replays_gates and not self.replays_experts:
            raise ValueError(
                "routing_weights must be learner unless routing_replay is rollout, got sampler and "
                f"{self.routing_replay}: the sampler's weights are those of its own experts, "
                "so set routing_replay: rollout too"
            )
        return self

    @model_validator(mode="after")
    def _gathers_in_buckets(self) -> LearnerConfig:
        if self.ddp.get("overlap_param_gather") and self.ddp.get("overlap_grad_reduce") is False:
            raise ValueError(
                "ddp.overlap_param_gather must not be true with ddp.overlap_grad_reduce false, "
                "which leaves one bucket to gather and nothing to overlap with; set both alike"
            )
        return self

    @model_validator(mode="after")
    def _refines_its_recomputation(self) -> LearnerConfig:
        problem = refinement_problem(self.recompute, self.megatron)
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Returns the parts of each layer that are recomputed alone, in Megatron's words."""
        if self.recompute != "selective":
            return ()
        return tuple(self.megatron.get("recompute_modules", FEED_FORWARD))

    @property
    def replays_experts(self) -> bool:
        """Returns whether tokens visit the sampler's experts."""
        return self.routing_replay == "rollout"

    @property
    def replays_gates(self) -> bool:
        """Returns whether the sampler's weights scale their outputs."""
        return self.routing_weights == "sampler"

    @property
    def uneven_stages(self) -> bool:
        """Returns whether `megatron` says how many layers each pipeline stage holds."""
        return any(self.megatron.get(name) for name in UNEVEN_STAGES)
