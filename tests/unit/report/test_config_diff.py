"""Which keys a run sets, and in which keys runs differ."""

from typing import Any

from megatron_opd.config.schema import Config
from megatron_opd.report.config_diff import ABSENT, REQUIRED, Resolved, resolve, settings_of


def tree(**sections: Any) -> dict[str, Any]:
    plain = {"data": {"train": "t"}, "student": {"model": "m"}, "teacher": {"model": "n"}}
    return Config.model_validate(plain | sections).model_dump(mode="json")


def own(found: Resolved) -> dict[str, tuple[str, str]]:
    assert found.own is not None
    return {key: (found.defaults[key], found.all[key]) for key in found.own}


def test_a_run_of_defaults_sets_what_is_required_alone():
    found = own(resolve(tree()))
    assert set(found) == {"data.train", "student.model", "teacher.model"}
    assert {default for default, _ in found.values()} == {REQUIRED}
    assert found["student.model"] == (REQUIRED, "m")


def test_keys_that_are_set_are_named_with_their_defaults():
    found = own(resolve(tree(schedule={"max_staleness": 3}, learner={"optimizer": {"lr": 1e-5}})))
    assert found["schedule.max_staleness"] == ("1.0", "3.0")
    assert found["learner.optimizer.lr"] == ("1e-06", "1e-05")


def test_what_follows_from_a_type_is_not_set():
    found = own(resolve(tree(schedule={"type": "sync"})))
    assert found["schedule.type"] == ("async", "sync")
    assert "schedule.max_staleness" not in found


def test_an_objective_of_another_type_is_compared_with_its_own_defaults():
    mild = own(resolve(tree(objective={"type": "jsd"})))
    assert [key for key in mild if key.startswith("objective.")] == ["objective.type"]


def test_named_teachers_are_sections_too():
    teachers = {"b": {"model": "x", "servers": 3}}
    found = own(resolve(tree(teachers=teachers, data={"train": "t", "teacher_key": "of"})))
    assert found["teachers.b.servers"] == ("1", "3")
    assert found["teachers.b.model"] == (REQUIRED, "x")


def test_a_file_of_another_version_is_shown_without_defaults():
    found = resolve({"run": {"seed": 7, "speed": "high"}, "empty": {}})
    assert found.own is None
    assert found.all == {"run.seed": "7", "run.speed": "high", "empty": "{}"}
    assert "speed" in found.text
    assert settings_of([found]) == ()


def test_runs_side_by_side_show_what_one_of_them_sets_and_where_they_differ():
    a = resolve(tree(schedule={"max_staleness": 3}, objective={"type": "jsd"}))
    b = resolve(tree(support={"type": "topk"}))
    found = {each.key: each for each in settings_of([a, b, None])}
    assert found["schedule.max_staleness"].values == ("3.0", "1.0", "")
    assert found["schedule.max_staleness"].differs_between_runs
    assert "schedule.order" not in found or found["schedule.order"].values[2] == ""
    assert ABSENT in found["support.type"].values or found["support.type"].values[0] != "topk"
    alike = settings_of([a, a])
    assert not any(each.differs_between_runs for each in alike)
