"""What goes together: every rule with the line a user sees, and the whole product of the tables."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from megatron_opd.config import estimator as estimator_module
from megatron_opd.config import rules as rules_module
from megatron_opd.config import schema
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.load import ConfigError, dump_config, load_config
from megatron_opd.config.schema import Config
from megatron_opd.losses.formulas import formula
from tests.support.loss_cases import products

Tree = dict[str, Any]
PATH: Tree = {"type": "path"}
CLIP: Tree = {"type": "clip"}

REFUSED: list[tuple[Tree, list[str], Tree]] = [
    # a combination, what its line must say, and the nearest choice that the line names
    (
        {
            "support": {"type": "mc"},
            "objective": {
                "type": "mixture",
                "terms": [{"objective": {"type": "grpo"}}, {"objective": {"type": "ppo"}}],
            },
        },
        ["objective.terms", "at most one objective from rewards", "got 2"],
        {"objective": {"type": "grpo"}, "support": PATH},
    ),
    (
        {"support": {"type": "teacher_topk"}, "objective": {"advantage": "rollout"}},
        [
            "reverse_kl",
            "advantage rollout",
            "sampler's log-probs",
            "teacher_topk",
            "support.type mc",
        ],
        {"support": {"type": "mc"}},
    ),
    (
        {"support": {"type": "teacher_mc"}},
        ["reverse_kl", "teacher_mc", "forward_kl"],
        {"objective": {"type": "forward_kl"}},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"type": "sparse_reverse_kl"}},
        ["sparse_reverse_kl", "support.type mc", "random sample", "reverse_kl"],
        {"support": {"type": "topk"}},
    ),
    (
        {"support": {"type": "teacher_mc"}, "objective": {"type": "jsd"}},
        ["objective.type jsd", "support.type teacher_mc", "use support.type mc or teacher_topk"],
        {"support": {"type": "teacher_topk"}},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"type": "forward_kl", "outside": "bucket"}},
        ["objective.outside bucket", "support.type mc", "leave it null", "teacher_topk"],
        {"objective": {"type": "forward_kl"}},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"outside": "renormalise"}},
        ["objective.outside renormalise", "support.type mc", "leave it null", "topk"],
        {"support": {"type": "topk"}},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"type": "grpo"}},
        ["objective.type grpo", "sampled token alone", "support.type mc", "use support.type path"],
        {"support": PATH},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"type": "ppo", "kl": {"coefficient": 1}}},
        ["objective.type ppo", "use support.type path"],
        {"support": PATH},
    ),
    (
        {"objective": {"trust": CLIP}, "correction": {"type": "none"}},
        ["objective.trust", "correction.type none", "correction.prox true"],
        {"correction": {"type": "none", "prox": True}},
    ),
    (
        {"objective": {"trust": CLIP}, "correction": {"type": "truncated"}},
        ["objective.trust", "correction.type truncated", "correction.prox true", "PPO-TIS"],
        {"correction": {"type": "truncated", "prox": True}},
    ),
    (
        {
            "objective": {"type": "grpo"},
            "correction": {"type": "importance", "level": "sequence"},
        },
        ["objective.trust", "at level sequence", "objective.trust.type none"],
        {"objective": {"type": "grpo", "trust": {"type": "none"}}},
    ),
    (
        {
            "objective": {"type": "gspo", "trust": {"type": "none"}},
            "correction": {"type": "truncated"},
        },
        ["objective.type gspo", "correction.type importance", "correction.prox true"],
        {"correction": {"type": "importance"}},
    ),
    (
        {"objective": {"type": "gepo"}, "correction": {"type": "importance", "prox": True}},
        ["objective.type gepo", "E_q[q]", "prox false"],
        {"correction": {"type": "importance"}},
    ),
    (
        {
            "objective": {"type": "gepo", "trust": {"type": "none"}},
            "correction": {"type": "none"},
        },
        ["objective.type gepo", "correction.type importance"],
        {"correction": {"type": "importance"}},
    ),
    (
        {"objective": {"type": "gspo", "trust": {"type": "m2"}}},
        ["objective.trust.type m2", "objective.type gspo", "trust.type clip or none"],
        {"objective": {"type": "gspo", "trust": CLIP}},
    ),
    (
        {"correction": {"type": "truncated", "level": "geometric"}},
        ["correction.level geometric", "support.type mc", "support.type path", "level token"],
        {"support": PATH},
    ),
    (
        {
            "support": {"type": "exact"},
            "objective": {"type": "jsd"},
            "correction": {"type": "truncated"},
        },
        ["correction.type truncated", "nothing to correct", "jsd", "leave correction null"],
        {"correction": None},
    ),
]


def line_of(tree: Tree) -> str:
    with pytest.raises(ValidationError) as caught:
        Estimator.model_validate(tree)
    (error,) = caught.value.errors()
    message = error["msg"].removeprefix("Value error, ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("tree", "words", "fix"), REFUSED, ids=str)
def test_a_refusal_is_one_line_and_names_a_choice_that_works(
    tree: Tree, words: list[str], fix: Tree
):
    message = line_of(tree)
    for word in words:
        assert word in message
    Estimator.model_validate(tree | fix)


def test_the_table_covers_every_rule_of_an_estimator():
    broken: set[int] = set()
    for tree, _, _ in REFUSED:
        message = line_of(tree)
        est = Estimator.model_construct(**_parts(tree))
        for number, rule in enumerate(estimator_module.RULES):
            said = [rule.says(one, est) for one in est.objectives if rule.broken(one, est)]
            if message in said:
                broken.add(number)
    assert broken == set(range(len(estimator_module.RULES)))


def _parts(tree: Tree) -> Tree:
    """The sections of a refused tree, each valid on its own."""

    class Loose(Estimator):
        """The same sections without the rule."""

        def _parts_go_together(self) -> "Loose":
            return self

    return dict(Loose.model_validate(tree))


# of loss_cases.products(), by objective; a rule that changes must change these knowingly
ACCEPTED = {
    "reverse_kl": 444,
    "forward_kl": 49,
    "jsd": 48,
    "skew_forward_kl": 49,
    "skew_reverse_kl": 48,
    "mixture": 134,
    "reinforce": 174,
    "ppo": 138,
    "grpo": 138,
    "gspo": 96,
    "gepo": 16,
    "sparse_reverse_kl": 9,
}
NUM_PRODUCTS = 13524


def test_the_whole_product_is_decided_as_before():
    """Counts of what is accepted, so that a rule cannot silently widen or narrow.

    tests/unit/losses/test_objective.py evaluates all of them; here every refusal must be one line.
    """
    accepted: Counter[str] = Counter()
    refused: Counter[int] = Counter()
    for tree in products():
        try:
            est = Estimator.model_validate(tree)
        except ValidationError as error:
            (problem,) = error.errors()
            assert problem["msg"].startswith("Value error, ")
            assert "\n" not in problem["msg"]
            refused[len(problem["msg"]) > 250] += 1
            continue
        accepted[est.objective.type] += 1
        assert all("\n" not in text and text for _, text in formula(est))
    assert not refused[True], "a line of more than 250 characters is not one line"
    assert dict(accepted) == ACCEPTED
    assert sum(refused.values()) + sum(accepted.values()) == NUM_PRODUCTS


@pytest.mark.parametrize(
    "kind",
    [
        "reverse_kl",
        "sparse_reverse_kl",
        "forward_kl",
        "jsd",
        "skew_forward_kl",
        "skew_reverse_kl",
        "reinforce",
        "ppo",
        "grpo",
        "gspo",
        "gepo",
    ],
)
def test_every_objective_is_valid_by_its_name_alone(kind: str):
    assert Estimator.model_validate({"objective": {"type": kind}}).objective.type == kind


@pytest.mark.parametrize(
    ("objective", "reduction"),
    [
        ({"type": "gspo"}, "sequence_mean"),
        ({"type": "gepo"}, "sequence_mean"),
        ({"type": "grpo"}, "token_mean"),
        ({"type": "reverse_kl"}, "token_mean"),
        ({"advantage": "rollout"}, "token_mean"),
        ({"type": "mixture", "terms": [{"objective": {"type": "gepo"}}]}, "sequence_mean"),
        (
            {
                "type": "mixture",
                "terms": [{"objective": {"type": "gspo"}}, {"objective": {"type": "forward_kl"}}],
            },
            "token_mean",
        ),
    ],
    ids=str,
)
def test_a_reduction_that_is_not_named_is_that_of_the_paper_and_is_written_down(
    tmp_path: Path, objective: Tree, reduction: str
):
    assert Estimator.model_validate({"objective": objective}).reduction.type == reduction
    tree = MINIMAL | {"objective": objective, "rollout": {"group_size": 8}}
    tree |= {"data": MINIMAL["data"] | {"task": "exact"}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    config = load_config(Config, path)
    assert config.reduction.type == config.estimator.reduction.type == reduction
    assert yaml.safe_load(dump_config(config))["reduction"]["type"] == reduction
    named = load_config(Config, path, ["reduction.type=fixed_length"])
    assert named.reduction.type == named.estimator.reduction.type == "fixed_length"


def test_advantages_and_clips_are_those_of_the_papers_by_default():
    defaults = {
        kind: Estimator.model_validate({"objective": {"type": kind}}).objective
        for kind in ("grpo", "gspo", "gepo")
    }
    # GEPO Eq. 5 and 12: no standard deviation, no clip, no defensive term
    gepo = defaults["gepo"].model_dump()
    assert (gepo["advantage"], gepo["trust"]["type"], gepo["defensive"]) == (
        "group_mean",
        "none",
        0,
    )
    for kind in ("grpo", "gspo"):
        found = defaults[kind].model_dump()
        assert (found["advantage"], found["trust"]["type"]) == ("group_std", "clip")
        assert found["kl"] is None


# --- rules across the sections of a run ---------------------------------------------------------

MINIMAL = {
    "data": {"train": "train.jsonl"},
    "student": {"model": "student"},
    "teacher": {"model": "teacher"},
}
RUN_REFUSED: list[tuple[list[str], list[str], list[str]]] = [
    (
        ["student.urls=['http://h:1']", "teacher.urls=['http://h:1']"],
        ["student.urls", "teacher.urls", "different servers", "http://h:1"],
        ["teacher.urls=['http://h:2']"],
    ),
    (
        ["support.type=teacher_topk", "objective.advantage=rollout"],
        ["objective.type reverse_kl", "support.type teacher_topk"],
        ["objective={type: forward_kl}"],
    ),
    (
        ["buffer.batch_size=6", "learner.parallel={ep: 2, dp: 4}"],
        ["buffer.batch_size", "learner.num_mini_batches", "6", "4"],
        ["buffer.batch_size=8"],
    ),
    (
        ["buffer.batch_size=4", "learner.parallel={pp: 4, vpp: 2, dp: 2}"],
        ["buffer.batch_size", "learner.parallel.vpp", "pp=4"],
        ["buffer.batch_size=8"],
    ),
    (["teacher=null"], ["missing key 'teacher'", "reverse_kl"], ["teacher={model: there}"]),
    (
        ["teachers={teacher: {model: there}}", "data.teacher_key=who"],
        ["teachers", "'teacher'"],
        ["teachers={other: {model: there}}"],
    ),
    (
        ["teachers={maths: {model: there}}"],
        ["data.teacher_key", "teachers", "null"],
        ["data.teacher_key=who"],
    ),
    (
        ["objective.type=grpo", "rollout.group_size=2", "data.teacher_key=who"],
        ["data.teacher_key who", "grpo", "leave it null"],
        ["data.teacher_key=null"],
    ),
    (
        [
            "objective.type=grpo",
            "rollout.group_size=2",
            "data.teacher_key=who",
            "teachers={maths: {model: there}}",
        ],
        ["teachers has no effect", "grpo"],
        ["teachers={}", "data.teacher_key=null"],
    ),
    (
        ["student.base_port=30000", "teacher.base_port=30000"],
        ["student.base_port", "teacher.base_port", "30000"],
        ["teacher.base_port=30100"],
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
        ["objective.type=reinforce", "data.task=none"],
        ["data.task", "reinforce", "'none'"],
        ["data.task=exact"],
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
        ["buffer.hold_batches=3"],
        ["buffer.hold_batches=3", "buffer.max_staleness=1"],
        ["buffer.max_staleness=3"],
    ),
    (
        ["run.deterministic=true"],
        ["buffer.hold_batches=0", "buffer.max_staleness=1", "run.deterministic"],
        ["buffer.hold_batches=1"],
    ),
    (
        [
            "run.deterministic=true",
            "buffer.hold_batches=1",
            "learner.megatron.deterministic_mode=false",
        ],
        ["learner.megatron.deterministic_mode", "must not be false", "run.deterministic"],
        ["learner.megatron.deterministic_mode=true"],
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
            "got 5 and 10",
        ],
        ["learner.optimizer.optimizer_cpu_offload=false"],
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

    def watched(rule: Any) -> Any:
        def run(config: Config) -> str | None:
            said = rule(config)
            if said is not None:
                broken.add(rule.__name__)
            return said

        return run

    monkeypatch.setattr(schema, "RULES", tuple(map(watched, rules_module.RULES)))
    for overrides, _, _ in RUN_REFUSED:
        assert run_error(tmp_path, overrides) is not None
    assert broken == {rule.__name__ for rule in rules_module.RULES}


def test_top_p_is_free_where_no_log_prob_of_the_sampler_is_compared(tmp_path: Path):
    for overrides in (
        ["objective.type=forward_kl", "support.type=teacher_topk"],
        ["objective={type: gspo}", "correction={type: none, prox: true}", "rollout.group_size=2"],
        ["objective={type: reinforce}", "correction.type=none"],
    ):
        assert run_error(tmp_path, ["rollout.top_p=0.9", *overrides]) is None
