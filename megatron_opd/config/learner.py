"""The learner's section: how the model is spread, how it steps, how it listens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from megatron_opd.config.section import (
    OFF_IS_A_WORD,
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
RoutingReplay = Annotated[Literal["off", "rollout", "current"], OFF_IS_A_WORD]


class ParallelConfig(Section):
    """Learner ranks = tp * cp * pp * dp, as in Megatron-Core.

    Experts have a layout of their own over the same ranks of a pipeline stage: ep * etp of them
    hold the experts once.
    """

    tp: Processes = 1
    """Tensor-parallel ranks; sequence parallelism comes with them."""
    cp: Processes = 1
    """Ranks that share a sequence's tokens."""
    pp: Processes = 1
    """Pipeline stages."""
    vpp: Processes = 1
    """Model chunks of a stage: above 1 the pipeline is interleaved."""
    dp: Processes = 1
    """Ranks that see different samples."""
    ep: Processes = 1
    """Ranks that split the experts; ep * etp must divide tp * cp * dp."""
    etp: Processes | None = None
    """Tensor-parallel ranks of an expert; null: tp without ep, else 1."""

    @property
    def world_size(self) -> int:
        """Learner ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of an expert."""
        if self.etp is not None:
            return self.etp
        return self.tp if self.ep == 1 else 1

    @model_validator(mode="after")
    def _experts_fit(self) -> ParallelConfig:
        ranks = self.tp * self.cp * self.dp
        if self.ep == 1 and self.expert_tp != self.tp:
            raise ValueError(
                "etp must equal tp when ep is 1, or Megatron-Core 0.16.1 never adds up expert "
                f"gradients over the tensor-parallel ranks; got etp={self.etp}, tp={self.tp}"
            )
        if ranks % (self.ep * self.expert_tp):
            raise ValueError(
                "ep * etp must divide tp * cp * dp, the ranks that experts are spread over, got "
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
    """AdamW with float32 main parameters.

    Any other key must be a field of Megatron-Core's OptimizerConfig (learner/overrides.py), such as
    optimizer_cpu_offload, use_precision_aware_optimizer or exp_avg_dtype.
    """

    model_config = ConfigDict(extra="allow")

    lr: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Peak learning rate. AdamW moves a weight by about so much an update: higher learns faster and
    diverges sooner."""
    min_lr: NonNegativeFloat = 0.0
    """Where cosine ends."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After warm-up: constant, or cosine down to min_lr at the last update."""
    warmup_updates: NonNegativeInt = 0
    """Updates in which the learning rate rises linearly from 0 to lr; at most run.updates. More
    start more gently and learn less."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """First moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Second moment."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator; raising it damps steps where gradients are small."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled."""
    clip_grad: NonNegativeFloat = 1.0
    """Global norm; 0 = off."""

    @property
    def megatron(self) -> dict[str, Any]:
        """The keys that are Megatron's alone."""
        return dict(self.model_extra or {})

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


class LearnerConfig(Section):
    """The Megatron-Core learner; it starts from student.model."""

    parallel: ParallelConfig = ParallelConfig()
    dtype: Dtype = "bfloat16"
    """Weights and activations; main parameters are float32 either way."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per batch."""
    tokens_per_microbatch: PositiveInt = 8192
    """Packing budget of one rank's micro-batch, prompts included; a longer sample gets one of its
    own."""
    recompute: bool = False
    """Recompute activations in the backward pass."""
    logp: Literal["lean", "dense"] = "lean"
    """How log-probs come from the LM head: lean never holds [tokens, vocabulary]; dense does, and
    is what lean is checked against."""
    routing_replay: RoutingReplay = "off"
    """Which experts tokens of an MoE student visit. off: the learner's routers choose; rollout: as
    they did when the fleet last computed the token (R3); current: as they do at the batch's start,
    in all its mini-batches and recomputations."""
    routing_compare_every: NonNegativeInt = 0
    """Updates between those that also measure, in a forward pass of its own, how far from the
    sampler the learner would be without replay (mismatch_free_*); 0 = never. Nothing is measured
    with rollout.top_p below 1."""
    optimizer: OptimizerConfig = OptimizerConfig()
    megatron: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Fields of Megatron-Core's TransformerConfig, such as moe_token_dispatcher_type,
    recompute_granularity or fp8; the model's config.json and learner.parallel set the rest."""
    ddp: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Fields of Megatron-Core's DistributedDataParallelConfig, such as overlap_grad_reduce,
    overlap_param_gather or bucket_size."""
    listen_host: Host = "127.0.0.1"
    """Name or IPv4 address on which the controller's ZeroMQ socket listens."""
    listen_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 picks a free port."""
    threads: Processes | None = None
    """CPU threads a rank; null leaves torch's choice."""
    timeout_s: Seconds = 1800.0
    """Longest wait for one reply of the learner."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU in GiB (79 for an 80 GB H100, 139 for an H200): `opd check` refuses what
    cannot fit; null: it only says what is needed."""

    @model_validator(mode="after")
    def _compares_a_replay(self) -> LearnerConfig:
        if self.routing_compare_every and self.routing_replay != "rollout":
            raise ValueError(
                "routing_compare_every must be 0 unless routing_replay is rollout, "
                f"got {self.routing_compare_every} and {self.routing_replay}"
            )
        return self

    @property
    def uneven_stages(self) -> bool:
        """Whether `megatron` says how many layers each pipeline stage holds."""
        return any(self.megatron.get(name) for name in UNEVEN_STAGES)
