"""Rules across the sections of a run, each with the line a user sees."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_opd.config import schema
from megatron_opd.config.alignment_rules import ALIGNMENT_RULES
from megatron_opd.config.api_rules import API_RULES
from megatron_opd.config.environment_rules import ENVIRONMENT_RULES
from megatron_opd.config.load import ConfigError, load_config
from megatron_opd.config.schema import Config
from megatron_opd.config.site_rules import SITE_RULES
from megatron_opd.config.source_rules import SOURCE_RULES
from tests.support.config_files import MINIMAL
from tests.support.teacher_refusals import TEACHER_REFUSED

MIXTURE = (
    "objective={type: mixture, terms: [{objective: {type: reverse_kl}}, {objective: {type: grpo}}]}"
)
RUN_REFUSED: list[tuple[list[str], list[str], list[str]]] = [
    *TEACHER_REFUSED,
    (
        ["environment={type: user, teacher: large}", "data.chat_template=true"],
        ["environment.teacher must be one of 'teacher'", "got 'large'"],
        ["environment={type: user, teacher: teacher}"],
    ),
    (
        ["student.urls=['http://127.0.0.1:1']", "teacher.urls=['http://127.0.0.1:1']"],
        ["student.urls", "teacher.urls", "different servers", "http://127.0.0.1:1"],
        ["teacher.urls=['http://127.0.0.1:2']"],
    ),
    (
        ["student.urls=['http://localhost:1', 'http://10.0.0.5:1']"],
        ["student.api_key_env", "got null and http://10.0.0.5:1", "security.insecure: true"],
        ["student.api_key_env=KEY"],
    ),
    (
        ["teacher.urls=['https://node7:1']"],
        ["teacher.api_key_env", "got null and https://node7:1"],
        ["security.insecure=true"],
    ),
    (
        [
            "data.teacher_key=who",
            "teachers={maths: {model: m, urls: ['http://[2001:db8::1]:1']}}",
        ],
        ["teachers.maths.api_key_env", "got null and http://[2001:db8::1]:1"],
        ["teachers={maths: {model: m, urls: ['http://[::1]:1']}}"],
    ),
    (
        ["workers.count=2", "learner.listen_host=0.0.0.0"],
        ["learner.listen_host", "workers.count > 0", "got 0.0.0.0", "workers.count 2"],
        ["workers.count=0"],
    ),
    (
        ["cluster.interface=ib0", "cluster.env={NCCL_SOCKET_IFNAME: eth0}"],
        ["cluster.interface must be null with cluster.env.NCCL_SOCKET_IFNAME", "ib0 and eth0"],
        ["cluster.env={}"],
    ),
    (
        ["cluster.interface=ib0", "cluster.env={GLOO_SOCKET_IFNAME: eth0}"],
        ["cluster.interface must be null with cluster.env.GLOO_SOCKET_IFNAME", "ib0 and eth0"],
        ["cluster.interface=null"],
    ),
    (
        ["support.type=teacher_topk", "objective.advantage=rollout"],
        ["objective.type reverse_kl", "support.type teacher_topk"],
        ["objective={type: forward_kl}"],
    ),
    (
        ["buffer.batch_size=7", "learner.num_mini_batches=2"],
        ["buffer.batch_size", "learner.num_mini_batches", "7", "2"],
        ["buffer.batch_size=8"],
    ),
    (
        ["buffer.batch_size=6", "learner.num_mini_batches=2", "learner.parallel={ep: 2, dp: 4}"],
        ["buffer.batch_size", "learner.num_mini_batches", "6 / 2", "dp=4"],
        ["buffer.batch_size=10"],
    ),
    (
        ["buffer.batch_size=4", "learner.parallel={pp: 4, vpp: 2, dp: 2}"],
        ["buffer.batch_size", "learner.parallel.vpp", "pp=4"],
        ["buffer.batch_size=8"],
    ),
    (
        ["student.base_port=30000", "teacher.base_port=30000"],
        ["student.base_port", "teacher.base_port", "30000"],
        ["teacher.base_port=30100"],
    ),
    (
        ["student.gpus=[3]", "learner.gpus=[3]"],
        ["learner.gpus and student.gpus must not share a GPU", "got GPU 3 in both", "name others"],
        ["cluster.share_gpus=true"],
    ),
    (
        ["student.gpus=[3]", "learner.gpus=[3]", "schedule.type=sync"],
        ["got GPU 3 in both", "cluster.share_gpus: true or schedule.time_shared: true"],
        ["schedule.time_shared=true"],
    ),
    (
        [
            *("schedule.type=sync", "schedule.time_shared=true", "student.gpus=[3]"),
            *("learner.gpus=[3]", "teacher.gpus=[3]"),
        ],
        ["student.gpus and teacher.gpus must not share a GPU", "set cluster.share_gpus: true"],
        ["teacher.gpus=[2]"],
    ),
    (
        ["schedule.time_shared=true"],
        ["schedule.time_shared must be false unless", "schedule.max_staleness is 0", "got 1 and 1"],
        ["schedule.type=sync"],
    ),
    (
        ["schedule.type=stream", "schedule.time_shared=true"],
        ["schedule.time_shared must be false unless", "schedule.sync_every 1", "got 0 and 4"],
        ["schedule.type=sync", "schedule.sync_every=1"],
    ),
    (
        ["schedule.type=sync", "schedule.time_shared=true", "cluster.type=slurm"],
        ["schedule.time_shared must be false with cluster.type slurm", "use local or external"],
        ["cluster.type=external"],
    ),
    (
        ["schedule.type=sync", "schedule.time_shared=true", "weight_sync.overlap=true"],
        ["schedule.time_shared must be false with weight_sync.overlap", "set one of them false"],
        ["weight_sync.overlap=false"],
    ),
    (
        [
            *("schedule.type=sync", "schedule.time_shared=true", "checkpoint.every_minutes=0"),
            "learner.optimizer.optimizer_cpu_offload=true",
        ],
        ["schedule.time_shared must be false with learner.optimizer.optimizer_cpu_offload"],
        ["learner.optimizer.optimizer_cpu_offload=false"],
    ),
    (
        ["student.gpus=[3]", "cluster.type=ray"],
        ["student.gpus must be null with cluster.type ray", "got [3]"],
        ["cluster.type=local"],
    ),
    (
        [
            "data.teacher_key=who",
            "teacher={model: t, servers: 2, gpus: [7, 0]}",
            "teachers={maths: {model: m, gpus: [0]}}",
        ],
        ["teacher.gpus and teachers.maths.gpus", "GPU 0", "cluster.share_gpus: true"],
        ["teachers={maths: {model: m, gpus: [1]}}"],
    ),
    (
        ["objective.type=gepo"],
        ["rollout.group_size", ">= 2", "gepo", "got 1"],
        ["rollout.group_size=4"],
    ),
    (
        ["objective.type=grpo", "rollout.group_size=5"],
        ["buffer.batch_size=64", "rollout.group_size=5", "multiple"],
        ["rollout.group_size=8"],
    ),
    (
        ["objective.type=reinforce", "selection.groups.type=reward_spread"],
        ["selection.groups.type must be all with objective.type reinforce", "got reward_spread"],
        ["objective.type=grpo", "rollout.group_size=8"],
    ),
    (
        [MIXTURE, "rollout.group_size=8", "selection.groups.type=reward_spread"],
        ["selection.groups.type must be all", "data.teacher_weight_key null", "mixture"],
        ["data.teacher_weight_key=kl"],
    ),
    (
        ["selection.overlong={type: soft_penalty, cache: 8}"],
        ["selection.overlong.type soft_penalty has no effect", "reverse_kl", "use filter"],
        ["selection.overlong={type: mask}"],
    ),
    (
        [
            *("objective.type=grpo", "rollout.group_size=8", "rollout.max_new_tokens=16"),
            "selection.overlong={type: soft_penalty, cache: 17}",
        ],
        ["selection.overlong.cache must be <= rollout.max_new_tokens", "got 17 and 16"],
        ["rollout.max_new_tokens=17"],
    ),
    (
        ["data.reward_weight_key=share"],
        ["data.reward_weight_key share needs", "got objective.type reverse_kl", "mixture"],
        [MIXTURE, "rollout.group_size=8"],
    ),
    (
        ["objective.type=grpo", "rollout.group_size=8", "data.teacher_weight_key=kl"],
        ["data.teacher_weight_key kl needs", "got objective.type grpo"],
        [MIXTURE],
    ),
    (
        ["data.curriculum.type=pass_rate", "data.task=none"],
        ["data.curriculum needs pass rates", "data.task none has no verifier"],
        ["data.task=exact"],
    ),
    (
        ["objective.type=reinforce", "data.task=none"],
        ["data.task", "reinforce", "'none'"],
        ["data.task=exact"],
    ),
    (
        ["data.task=code"],
        ["data.task code", "verifier.code.enabled: true", "got false"],
        ["verifier.code.enabled=true"],
    ),
    (
        ["verifier.code={enabled: true, timeout_s: 10}"],
        ["code.timeout_s must be below timeout_s", "got 10 and 10"],
        ["verifier.timeout_s=11"],
    ),
    (
        ["verifier={memory_bytes: 1000, code: {enabled: true, memory_bytes: 1001}}"],
        ["code.memory_bytes must be at most memory_bytes", "1001 and 1000"],
        ["verifier.memory_bytes=1001"],
    ),
    (
        ["rollout.top_p=0.9"],
        ["rollout.top_p", "correction.type importance", "raw learner log-probs", "got 0.9"],
        ["rollout.top_p=1"],
    ),
    (
        ["rollout.top_p=0.9", "correction.type=none"],
        ["rollout.top_p", "support.type mc", "teacher_topk"],
        ["objective={type: forward_kl}", "support={type: teacher_topk}", "correction=null"],
    ),
    (
        [
            "rollout.top_p=0.9",
            "correction.type=none",
            "objective={type: reinforce, kl: {coefficient: 0.1, to: sampler}}",
        ],
        ["rollout.top_p", "objective.kl", "got 0.9"],
        ["rollout.top_p=1"],
    ),
    (
        ["schedule.order=completion", "schedule.max_age=0"],
        ["schedule.max_age must be >= 1", "schedule.sync_every 1", "got 0"],
        ["schedule.max_age=1"],
    ),
    (
        ["run.deterministic=true"],
        ["schedule.hold_batches must equal", "run.deterministic", "got 0, 1, 1 and admission"],
        ["schedule.type=controlled"],
    ),
    (
        ["run.deterministic=true"],
        ["schedule.hold_batches must equal", "run.deterministic", "got 0, 1, 1 and admission"],
        ["schedule.type=controlled", "schedule.delays.type=weibull"],
    ),
    (
        [
            "run.deterministic=true",
            "schedule.type=controlled",
            "learner.megatron.deterministic_mode=false",
        ],
        ["learner.megatron.deterministic_mode", "must not be false", "run.deterministic"],
        ["learner.megatron.deterministic_mode=true"],
    ),
    (
        ["run.deterministic=true", "schedule.type=controlled", "rollout.seeded=false"],
        ["rollout.seeded must be true with run.deterministic", "got false; leave it out"],
        ["rollout.seeded=true"],
    ),
    (
        ["run.deterministic=true", "schedule.type=controlled", "cluster.fleet_file=urls.txt"],
        ["cluster.fleet_file must be null with run.deterministic", "got urls.txt"],
        ["cluster.fleet_file=null"],
    ),
    (
        ["run.deterministic=true", "schedule.type=controlled", "weight_sync.overlap=true"],
        ["weight_sync.overlap must be false with run.deterministic", "got true; leave it out"],
        ["weight_sync.overlap=false"],
    ),
    (
        ["schedule.type=step_off", "schedule.max_staleness=5", "run.max_steps=5"],
        ["schedule.max_staleness must be < run.max_steps", "step_off", "got 5", "run.max_steps=5"],
        ["run.max_steps=6"],
    ),
    (
        ["learner.optimizer.warmup_steps=6", "run.max_steps=5"],
        ["learner.optimizer.warmup_steps must be <= run.max_steps", "got 6 and run.max_steps=5"],
        ["run.max_steps=6"],
    ),
    (
        ["checkpoint.every=5", "learner.optimizer.optimizer_cpu_offload=true"],
        [
            "checkpoint.every and checkpoint.every_minutes must be 0",
            "learner.optimizer.optimizer_cpu_offload",
            "got 5, 10 and false",
        ],
        ["learner.optimizer.optimizer_cpu_offload=false"],
    ),
    (
        ["student.quantization=int8", "weight_sync.round_to=fp8"],
        ["weight_sync.round_to must be null", "student.quantization", "got fp8 and int8"],
        ["weight_sync.round_to=null"],
    ),
    (
        ["student.quantization=fp8", "weight_sync.type=broadcast"],
        ["weight_sync.type must be shards", "student.quantization", "got broadcast and fp8"],
        ["weight_sync.type=my_module:MY_TRANSPORT"],
    ),
    (
        ["data.heldout={easy: there, other: there}", "evaluation.best_set=hard"],
        ["evaluation.best_set", "data.heldout (easy, other)", "got hard"],
        ["evaluation.best_set=other"],
    ),
    (
        ["data.heldout={a: {file: there, samples: 5}}", "evaluation.best_metric=pass@8"],
        ["evaluation.best_metric", "pass@1, pass@2, pass@4, pass@5", "5 samples", "got pass@8"],
        ["evaluation.best_metric=pass@4"],
    ),
    *(
        (
            [f"{key}={value}"],
            [f"{key} has no effect", "evaluation.every"],
            ["evaluation.every=2", *fix],
        )
        for key, value, fix in (
            ("evaluation.blocks", "true", []),
            ("evaluation.servers", "1", ["student.servers=2"]),
            ("evaluation.patience", "3", []),
            ("checkpoint.keep_best", "true", []),
        )
    ),
    (
        ["evaluation.every=2", "evaluation.problems=0", "evaluation.blocks=true"],
        ["evaluation.blocks has no effect", "evaluation.problems"],
        ["evaluation.problems=1"],
    ),
    (
        ["evaluation.every=6", "schedule.type=stream"],
        ["evaluation.every", "schedule.sync_every", "got 6 and 4"],
        ["evaluation.every=8"],
    ),
    (
        ["evaluation.every=2", "schedule={type: sync, time_shared: true}"],
        ["evaluation.blocks", "schedule.time_shared", "evaluation.every"],
        ["evaluation.blocks=true"],
    ),
    (
        ["evaluation.every=2", "evaluation.servers=2", "student.servers=2"],
        ["evaluation.servers", "student.servers", "got 2 of 2"],
        ["evaluation.servers=1"],
    ),
    (
        ["evaluation={every: 2, patience: 3}", "run.deterministic=true", "schedule.type=sync"],
        ["evaluation.blocks", "run.deterministic", "evaluation.patience"],
        ["evaluation.blocks=true"],
    ),
    (
        ["metrics.names=verl", "metrics.tensorboard=false"],
        ["metrics.names has no effect", "metrics.tensorboard or metrics.wandb", "got verl"],
        ["metrics.wandb={project: p}"],
    ),
    (
        ["metrics.health_every=5", "objective.type=grpo", "rollout.group_size=2"],
        ["metrics.health_every must be 0", "reads no teacher", "got 5"],
        ["metrics.health_every=0"],
    ),
    (
        ["objective={type: sft_on_teacher}", "workers.count=1"],
        ["workers.count must be 0 with objective.type sft_on_teacher", "got 1"],
        ["workers.count=0"],
    ),
    (
        ["metrics.health_every=5", "schedule.type=sync", "schedule.time_shared=true"],
        ["metrics.health_every must be 0 with schedule.time_shared", "got 5"],
        ["schedule.time_shared=false"],
    ),
]


def run_error(tmp_path: Path, overrides: list[str]) -> str | None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    try:
        load_config(Config, path, overrides)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("overrides", "words", "fix"), RUN_REFUSED, ids=str)
def test_rules_across_sections(
    tmp_path: Path, overrides: list[str], words: list[str], fix: list[str]
):
    message = run_error(tmp_path, overrides)
    assert message is not None
    assert "\n" not in message
    for word in words:
        assert word in message
    assert run_error(tmp_path, [*overrides, *fix]) is None


def test_the_table_covers_every_rule_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken: set[str] = set()
    rules = schema.ALL_RULES

    def watched(rule: Any) -> Any:
        def run(config: Config) -> str | None:
            said = rule(config)
            if said is not None:
                broken.add(rule.__name__)
            return said

        return run

    monkeypatch.setattr(schema, "ALL_RULES", tuple(map(watched, rules)))
    for overrides, _, _ in RUN_REFUSED:
        assert run_error(tmp_path, overrides) is not None
    own_files = (*SITE_RULES, *SOURCE_RULES, *ENVIRONMENT_RULES, *ALIGNMENT_RULES, *API_RULES)
    elsewhere = {rule.__name__ for rule in own_files}
    assert broken - elsewhere == {rule.__name__ for rule in rules} - elsewhere


def test_top_p_is_free_where_no_log_prob_of_the_sampler_is_compared(tmp_path: Path):
    for overrides in (
        ["objective.type=forward_kl", "support.type=teacher_topk"],
        ["objective={type: gspo}", "correction={type: none, prox: true}", "rollout.group_size=2"],
        ["objective={type: reinforce}", "correction.type=none"],
    ):
        assert run_error(tmp_path, ["rollout.top_p=0.9", *overrides]) is None
