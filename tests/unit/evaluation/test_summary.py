"""The keys of summary.json on evaluations."""

import json

from megatron_opd.evaluation.evaluations import Evaluations
from megatron_opd.evaluation.summary import summary_of
from megatron_opd.sim.clock import run_virtual
from tests.support.evaluating import World, some_set


def evaluated(names: dict[str, int], **settings: str) -> Evaluations:
    """Two updates' evaluations, best after 10."""
    world = World(right={10, 11})
    sets = {name: some_set(first_id) for name, first_id in names.items()}
    found = world.evaluations(sets, last_update=20, **settings)

    async def scenario() -> None:
        await found.before({"teacher": World(right={10, 50})})
        world.right = {10, 11, 12, 50}
        await world.train(found, 10)
        await found.finish()
        world.right = {10}
        await world.train(found, 20)
        await found.after(20)

    run_virtual(scenario())
    return found


def test_of_one_set() -> None:
    summary = summary_of(evaluated({"heldout": 10}), 20)
    assert summary["student_accuracy_before_pct"] == 50
    assert summary["student_accuracy_after_pct"] == 25
    assert summary["teacher_accuracy_pct"] == 25
    assert "teacher_accuracy_pct_by_name" not in summary
    assert set(summary["evaluations"]) == {"student before", "student after", "teacher"}
    picked = summary["evaluation_sets"]["heldout"]
    assert {when: row["update"] for when, row in picked.items()} == {
        "before": 0,
        "after": 20,
        "best": 10,
        "last": 20,
    }
    assert (summary["evaluations_skipped"], summary["evaluations_failed"]) == (0, 0)
    assert summary["stopped_early_at"] is None
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_of_several_sets_and_of_a_run_that_was_interrupted() -> None:
    found = evaluated({"easy": 10, "hard": 50}, best_set="hard")
    summary = summary_of(found, None)
    assert summary["student_accuracy_before_pct"] == 0, "of the set that says what is best"
    assert summary["student_accuracy_after_pct"] is None
    assert summary["teacher_accuracy_pct"] == 25
    assert set(summary["evaluations"]) == {
        *("student before on easy", "student before on hard", "teacher on easy", "teacher on hard")
    }
    easy, hard = (summary["evaluation_sets"][name] for name in ("easy", "hard"))
    assert (easy["best"]["update"], hard["best"]["accuracy_pct"]) == (10, 25)
    assert easy["after"] is None
    assert easy["last"]["update"] == 20


def test_of_a_run_without_evaluations() -> None:
    summary = summary_of(World().evaluations({}), None)
    assert summary["student_accuracy_before_pct"] is None
    assert summary["evaluation_sets"] == summary["evaluations"] == {}
