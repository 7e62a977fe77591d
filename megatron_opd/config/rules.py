"""Checks the rules that involve several sections. Each returns one line naming every key, or None.

A rule that compares parts of the estimator alone is in estimator.py.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_opd.config.cluster import LAUNCHED
from megatron_opd.config.sections import TRANSPORTS
from megatron_opd.config.selection import RewardSpread, SoftPenalty
from megatron_opd.config.servers import is_local_url
from megatron_opd.config.tree import ConfigTree, key_of_teacher
from sglang_bridge.listening import EVERY_ADDRESS


def estimator_problem(config: ConfigTree) -> str | None:
    """Return why the parts of the estimator do not go together; None: they do."""
    try:
        _ = config.estimator
    except ValueError as error:
        # pydantic's own error text spans lines; the rule's sentence is what the user needs
        errors = getattr(error, "errors", None)
        message = errors()[0]["msg"] if errors is not None else str(error)
        return str(message).removeprefix("Value error, ")
    return None


def _shares(config: ConfigTree) -> str | None:
    batch, minis = config.buffer.batch_size, config.learner.num_mini_batches
    parallel = config.learner.parallel
    if batch % minis:
        return (
            "buffer.batch_size must be a multiple of learner.num_mini_batches, "
            f"got {batch} and {minis}"
        )
    if batch // minis < parallel.least_samples:
        return (
            "buffer.batch_size / learner.num_mini_batches must be at least learner.parallel.dp, a "
            "sample for every rank (with learner.parallel.vpp above 1 times pp, because an "
            "interleaved pipeline needs one micro-batch per stage), "
            f"got {batch} / {minis} and dp={parallel.dp}, pp={parallel.pp}, vpp={parallel.vpp}; "
            "raise buffer.batch_size"
        )
    return None


def _ports(config: ConfigTree) -> str | None:
    taken: dict[int, str] = {}
    if config.learner.listen_port:
        taken[config.learner.listen_port] = "learner.listen_port"
    for key, section in config.served.items():
        for port in section.ports:
            if port in taken:
                return (
                    f"{taken[port]} and {key}.base_port must not share a port, "
                    f"both would use {port}"
                )
        taken |= dict.fromkeys(section.ports, f"{key}.base_port")
    return None


def _gpus(config: ConfigTree) -> str | None:
    served = {key: section.gpus for key, section in config.served.items()}
    named = {"learner": config.learner.gpus} | served
    kind = config.cluster.type
    for key, gpus in named.items():
        if gpus is not None and kind in LAUNCHED:
            return (
                f"{key}.gpus must be null with cluster.type {kind}, which chooses nodes and GPUs "
                f"itself, got {list(gpus)}"
            )
    if config.cluster.share_gpus:
        return None
    taken: dict[int, str] = {}
    for key, gpus in named.items():
        for gpu in gpus or ():
            if gpu in taken and not (config.schedule.time_shared and key == "student"):
                return (
                    f"{taken[gpu]}.gpus and {key}.gpus must not share a GPU, got GPU {gpu} in "
                    f"both; name others, or set {_way_to_share(taken[gpu], key)}"
                )
        taken |= dict.fromkeys(gpus or (), key)
    return None


def _way_to_share(one: str, other: str) -> str:
    in_turn = " or schedule.time_shared: true" if (one, other) == ("learner", "student") else ""
    return f"cluster.share_gpus: true{in_turn}"


def _time_shared(config: ConfigTree) -> str | None:
    schedule, key = config.schedule, "schedule.time_shared must be false"
    if not schedule.time_shared:
        return None
    if schedule.max_staleness or schedule.sync_every != 1:
        return (
            f"{key} unless schedule.max_staleness is 0 and schedule.sync_every 1, where servers "
            f"and learner never work at once, got {schedule.max_staleness:g} and "
            f"{schedule.sync_every}; use schedule.type sync"
        )
    if config.cluster.type in LAUNCHED:
        return (
            f"{key} with cluster.type {config.cluster.type}, which gives every process GPUs of its "
            "own; use local or external"
        )
    if config.weight_sync.overlap:
        return (
            f"{key} with weight_sync.overlap, which sends weights beside an update, got true in "
            "both; set one of them false"
        )
    if config.learner.optimizer.megatron.get("optimizer_cpu_offload"):
        return (
            f"{key} with learner.optimizer.optimizer_cpu_offload, which keeps the optimizer in "
            "host memory all the time; set one of them false"
        )
    return None


def _urls(config: ConfigTree) -> str | None:
    for name, section in config.all_teachers.items():
        shared = sorted(set(config.student.urls) & set(section.urls))
        if shared:
            return (
                f"student.urls and {key_of_teacher(name)}.urls must name different servers, "
                f"because every update changes the student's weights, got {shared[0]} in both"
            )
    return None


def _keys(config: ConfigTree) -> str | None:
    if config.security.insecure:
        return None
    for key, section in config.served.items():
        far = [url for url in section.urls if not is_local_url(url)]
        if far and section.api_key_env is None:
            return keyless_problem(key, far[0])
    return None


def _interface(config: ConfigTree) -> str | None:
    cluster = config.cluster
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if cluster.interface is not None and name in cluster.env:
            return (
                f"cluster.interface must be null with cluster.env.{name}, which would say the same "
                f"a second time, got {cluster.interface} and {cluster.env[name]}; leave one out"
            )
    return None


def keyless_problem(key: str, where: str) -> str:
    """Return why the servers of a section may not be used or started at `where`."""
    return (
        f"{key}.api_key_env must name the variable that holds the servers' API key beyond this "
        f"machine, got null and {where}; set it, or write security.insecure: true to do without"
    )


def _workers(config: ConfigTree) -> str | None:
    host = config.learner.listen_host
    if not config.workers.count or host not in EVERY_ADDRESS:
        return None
    return (
        "learner.listen_host must be an address with workers.count > 0, since learner ranks reach "
        f"data workers at it too, got {host} (every address) and workers.count "
        f"{config.workers.count}; name the one that they share"
    )


def _teachers(config: ConfigTree) -> str | None:
    estimator = config.estimator
    if estimator.asks_teacher and not config.all_teachers:
        reads = "reads its log-probs" if estimator.reads_teacher else "learns what it writes"
        return (
            f"missing key 'teacher': objective.type {config.objective.type} {reads}; "
            "add a section teacher with a model or urls"
        )
    if "teacher" in config.teachers:
        return (
            "teachers must not hold the name 'teacher', which means the section teacher; rename it"
        )
    scoring = [name for name in config.teachers if name != config.user_teacher]
    if scoring and not estimator.asks_teacher:
        return (
            f"teachers has no effect: objective.type {config.objective.type} reads no teacher; "
            "leave it out"
        )
    if scoring and config.data.teacher_key is None and not config.scoring.mixture:
        return (
            "data.teacher_key must name the column that says which of the teachers scores a "
            "prompt, got null; or let scoring.mixture weigh them"
        )
    if config.data.teacher_key is not None and not estimator.asks_teacher:
        return (
            f"data.teacher_key {config.data.teacher_key} has no effect: objective.type "
            f"{config.objective.type} reads no teacher; leave it null"
        )
    return None


def _groups(config: ConfigTree) -> str | None:
    size, batch = config.rollout.group_size, config.buffer.batch_size
    if config.estimator.reads_groups and size < 2:
        return (
            f"rollout.group_size must be >= 2 for objective.type {config.objective.type}, which "
            f"compares the responses of a prompt, got {size}"
        )
    if batch % size:
        return (
            "buffer.batch_size must be a multiple of rollout.group_size, "
            f"got buffer.batch_size={batch}, rollout.group_size={size}"
        )
    return None


def _rewards(config: ConfigTree) -> str | None:
    judged = config.data.task != "none" or config.environment is not None
    if config.estimator.reads_reward and not judged:
        return (
            f"data.task must name a verifier for objective.type {config.objective.type}, which "
            "learns from rewards, got 'none'; set math, exact or an objective without rewards"
        )
    return None


def _code(config: ConfigTree) -> str | None:
    key = "task" if config.data.task == "code" else "tasks"
    named = config.data.task, *config.data.tasks.values()
    if "code" in named and not config.verifier.code.enabled:
        return (
            f"data.{key} code needs verifier.code.enabled: true, which lets programs that the "
            f"model has written run on this machine, got false; set it, or another data.{key}"
        )
    return None


def _spread(config: ConfigTree) -> str | None:
    if not isinstance(config.selection.groups, RewardSpread):
        return None
    estimator, key = config.estimator, "selection.groups.type must be all"
    compares = any(
        objective.reward_advantage not in (None, "reward") for objective in estimator.objectives
    )
    if not compares:
        return (
            f"{key} with objective.type {config.objective.type}, whose advantage does not compare "
            "the rewards of a group, got reward_spread; use an advantage of the group, such as "
            "objective.type grpo's"
        )
    if estimator.distils and config.data.teacher_weight_key is None:
        return (
            f"{key} with objective.type {config.objective.type} and data.teacher_weight_key null, "
            "because groups without reward spread still learn from the teacher, got reward_spread; "
            "name the column of prompts' teacher weights, which is 0 for those to be judged"
        )
    return None


def _overlong(config: ConfigTree) -> str | None:
    overlong, limit = config.selection.overlong, config.rollout.max_new_tokens
    if not isinstance(overlong, SoftPenalty):
        return None
    if not config.estimator.reads_reward:
        return (
            "selection.overlong.type soft_penalty has no effect: objective.type "
            f"{config.objective.type} reads no reward; use filter, mask or keep"
        )
    if overlong.cache > limit:
        return (
            "selection.overlong.cache must be <= rollout.max_new_tokens, the limit that it ends "
            f"at, got {overlong.cache} and {limit}"
        )
    return None


def _weights(config: ConfigTree) -> str | None:
    estimator = config.estimator
    if estimator.reads_reward and estimator.distils:
        return None
    for key in ("reward_weight_key", "teacher_weight_key"):
        column = getattr(config.data, key)
        if column is not None:
            return (
                f"data.{key} {column} needs an objective from rewards and one with a teacher to "
                f"weigh against each other, got objective.type {config.objective.type}; use "
                "objective.type mixture, or leave it null"
            )
    return None


def _curriculum(config: ConfigTree) -> str | None:
    if config.data.curriculum is not None and config.data.task == "none":
        return (
            "data.curriculum needs pass rates, and data.task none has no verifier; name a task, or "
            "set data.curriculum null"
        )
    return None


def _top_p(config: ConfigTree) -> str | None:
    estimator, top_p = config.estimator, config.rollout.top_p
    if top_p == 1:
        return None
    if estimator.uses_ratio:
        return (
            f"rollout.top_p must be 1 with correction.type {estimator.applied_correction.type}, "
            "whose ratio compares raw learner log-probs with a truncated sampler's, "
            f"got {top_p}; set rollout.top_p 1, or correction.type none"
        )
    if estimator.penalises:
        return (
            "rollout.top_p must be 1 with objective.kl, which compares raw learner log-probs with "
            f"a truncated sampler's, got {top_p}; set rollout.top_p 1, or objective.kl null"
        )
    if estimator.support.owner == "student" and estimator.reads_teacher:
        return (
            f"rollout.top_p must be 1 with support.type {estimator.support.type}, which would miss "
            f"the ids that truncation drops, got {top_p}; set rollout.top_p 1, or objective.type "
            "forward_kl with support.type teacher_topk"
        )
    return None


def _aged(config: ConfigTree) -> str | None:
    age, least = config.schedule.max_age, config.schedule.least_bound(config.buffer.batch_size)
    if age is not None and age < least:
        return (
            f"schedule.max_age must be >= {least}, the bound of order admission with "
            f"schedule.max_staleness {config.schedule.max_staleness:g} and schedule.sync_every "
            f"{config.schedule.sync_every}, got {age}"
        )
    return None


def _deterministic(config: ConfigTree) -> str | None:
    schedule = config.schedule
    if config.run.deterministic and not schedule.exact:
        return (
            "schedule.hold_batches must equal schedule.max_staleness with run.deterministic, with "
            "schedule.sync_every 1 and schedule.order admission, otherwise timing decides which "
            f"weights sample a token, got {schedule.held}, {schedule.max_staleness:g}, "
            f"{schedule.sync_every} and {schedule.order}; use schedule.type controlled or sync"
        )
    if config.run.deterministic and config.learner.megatron.get("deterministic_mode") is False:
        return (
            "learner.megatron.deterministic_mode must not be false with run.deterministic, which "
            "turns it on where there is a GPU; leave it out"
        )
    if config.run.deterministic and not config.rollout.seeded:
        return (
            "rollout.seeded must be true with run.deterministic, where the seed decides every "
            "token, got false; leave it out"
        )
    if config.run.deterministic and config.cluster.fleet_file is not None:
        return (
            "cluster.fleet_file must be null with run.deterministic, which no server may join or "
            f"leave, got {config.cluster.fleet_file}"
        )
    return None


def _overlap(config: ConfigTree) -> str | None:
    if config.run.deterministic and config.weight_sync.overlap:
        return (
            "weight_sync.overlap must be false with run.deterministic, where every update waits "
            "for the weight sync before it, got true; leave it out"
        )
    return None


def _beyond_the_run(config: ConfigTree) -> str | None:
    schedule, updates = config.schedule, config.run.max_steps
    if schedule.type not in ("step_off", "controlled") or schedule.max_staleness < updates:
        return None
    return (
        f"schedule.max_staleness must be < run.max_steps with schedule.type {schedule.type}, or no "
        f"sample gets that stale, got {schedule.max_staleness:g} and run.max_steps={updates}"
    )


def _warmup(config: ConfigTree) -> str | None:
    return warmup_problem(config.learner.optimizer.warmup_steps, config.run.max_steps)


def warmup_problem(warmup: int, updates: int) -> str | None:
    """Return why a run of `updates` updates cannot warm up for `warmup`, or None."""
    if warmup <= updates:
        return None
    return (
        "learner.optimizer.warmup_steps must be <= run.max_steps, or the learning rate never "
        f"reaches learner.optimizer.lr, got {warmup} and run.max_steps={updates}"
    )


def _offloaded(config: ConfigTree) -> str | None:
    checkpoint = config.checkpoint
    if checkpoint.writes and config.learner.optimizer.megatron.get("optimizer_cpu_offload"):
        return (
            "checkpoint.every and checkpoint.every_minutes must be 0 and checkpoint.keep_best "
            "false with learner.optimizer.optimizer_cpu_offload, whose state cannot be saved, got "
            f"{checkpoint.every}, {checkpoint.every_minutes:g} and "
            f"{str(checkpoint.keep_best).lower()}; or set no offload"
        )
    return None


def _quantised(config: ConfigTree) -> str | None:
    format, sync = config.student.quantization, config.weight_sync
    if format is None:
        return None
    if sync.round_to is not None:
        return (
            "weight_sync.round_to must be null with student.quantization, which quantises what it "
            f"would only round, got {sync.round_to} and {format}"
        )
    if sync.type in TRANSPORTS and sync.type != "shards":
        return (
            "weight_sync.type must be shards with student.quantization, because only shards sends "
            f"quantised weights, got {sync.type} and {format}"
        )
    return None


def _metric_names(config: ConfigTree) -> str | None:
    metrics = config.metrics
    if metrics.names == "opd" or metrics.tensorboard or metrics.wandb is not None:
        return None
    return (
        "metrics.names has no effect without metrics.tensorboard or metrics.wandb, the sinks that "
        f"show names, got {metrics.names}; leave it out, or turn one of them on"
    )


def _health(config: ConfigTree) -> str | None:
    every = config.metrics.health_every
    if every == 0:
        return None
    if not config.estimator.reads_teacher:
        return (
            "metrics.health_every must be 0 with an objective that reads no teacher, whose "
            f"agreement with the student it measures, got {every}"
        )
    if config.schedule.time_shared:
        return (
            "metrics.health_every must be 0 with schedule.time_shared, where the student's servers "
            f"have no memory to score with while the learner works, got {every}"
        )
    return None


RULES: tuple[Callable[[ConfigTree], str | None], ...] = (
    _shares,
    _teachers,
    _ports,
    _gpus,
    _time_shared,
    _urls,
    _keys,
    _interface,
    _workers,
    _groups,
    _rewards,
    _code,
    _spread,
    _overlong,
    _weights,
    _curriculum,
    _top_p,
    _aged,
    _deterministic,
    _overlap,
    _offloaded,
    _beyond_the_run,
    _warmup,
    _quantised,
)
METRIC_RULES = (_metric_names, _health)
"""They are told after those of evaluations and sites."""
