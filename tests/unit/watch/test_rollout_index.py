"""The index of rollouts.jsonl against a slow look at every row."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_opd.watch.query import SORTS, Filters, Page
from megatron_opd.watch.rollout_index import RolloutIndex, mean_gap
from tests.support.watched_run import append_row, hostile_row, rollout_row, write_rollouts


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> RolloutIndex:
    path = tmp_path_factory.mktemp("run")
    write_rollouts(path, range(12), 4)
    index = RolloutIndex(path / "rollouts.jsonl")
    while index.read():
        pass
    return index


def all_rows(index: RolloutIndex) -> list[dict[str, Any]]:
    return [json.loads(index.row(number)) for number in range(len(index))]


def passes(row: dict[str, Any], filters: Filters) -> bool:
    values = {
        "update": row["update"],
        "reward": row["reward"],
        "staleness": row["staleness_versions"],
    }
    for name, value in values.items():
        least, most = getattr(filters, f"{name}_min"), getattr(filters, f"{name}_max")
        if least is not None and (value is None or value < least):
            return False
        if most is not None and (value is None or value > most):
            return False
    dropped = row["drop_reason"] is not None
    text = f"{row['prompt']}\n{''.join(row['tokens'])}".lower()
    return (
        (filters.outcome is None or (filters.outcome == "dropped") == dropped)
        and (filters.drop_reason is None or row["drop_reason"] == filters.drop_reason)
        and (filters.teacher is None or row["teacher"] == filters.teacher)
        and filters.text in text
    )


def test_the_gap_is_that_of_tokens_with_a_score():
    row = rollout_row(np.random.default_rng(0), 1, 2)
    scores = [None, *row.teacher_logp[1:]]
    found = mean_gap(msgspec.structs.replace(row, teacher_logp=scores))
    gaps = np.subtract(row.sampler_logp[1:], row.teacher_logp[1:])
    assert found == pytest.approx(gaps.mean())
    assert np.isnan(mean_gap(msgspec.structs.replace(row, teacher_logp=[None] * len(scores))))


bound = st.none() | st.sampled_from([0.0, 0.5, 1.0, 3.0, 8.0])
many = st.builds(
    Filters,
    update_min=bound,
    update_max=bound,
    reward_min=bound,
    reward_max=bound,
    staleness_min=bound,
    staleness_max=bound,
    outcome=st.sampled_from([None, "trained", "dropped"]),
    drop_reason=st.sampled_from([None, "nan_score", "other"]),
    teacher=st.sampled_from([None, "teacher", "other"]),
    text=st.sampled_from(["", "1", "let me check", "nothing like it"]),
    sort=st.sampled_from(SORTS),
    descending=st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(many)
def test_a_list_is_what_a_slow_look_finds(indexed: RolloutIndex, filters: Filters):
    found = indexed.find(filters, Page(0, 200))
    wanted = [i for i, row in enumerate(all_rows(indexed)) if passes(row, filters)]
    assert found.total == len(wanted)
    assert sorted(row["number"] for row in found.rows) == wanted
    if filters.sort == "update":
        assert [r["number"] for r in found.rows] == (wanted[::-1] if filters.descending else wanted)
        return
    values = [row[filters.sort] for row in found.rows]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=filters.descending)
    assert values == known + [None] * (len(values) - len(known))


def test_pages_together_are_the_list_also_while_it_grows(tmp_path: Path):
    write_rollouts(tmp_path, range(5), 4)
    index = RolloutIndex(tmp_path / "rollouts.jsonl")
    index.read()
    first = index.find(Filters(), Page(0, 8))
    write_rollouts(tmp_path, range(5, 9), 4)
    index.read()
    rest = index.find(Filters(upto=first.upto), Page(8, 50))
    numbers = [row["number"] for row in (*first.rows, *rest.rows)]
    assert numbers == list(range(19, -1, -1))
    assert index.find(Filters(), Page(0, 1)).rows[0]["number"] == 35


def test_a_summary_says_what_its_row_says(indexed: RolloutIndex):
    summary = indexed.find(Filters(descending=False), Page(5, 1)).rows[0]
    row = json.loads(indexed.row(5))
    assert summary["number"] == 5
    assert summary["tokens"] == len(row["tokens"])
    assert (summary["uid"], summary["update"]) == (row["uid"], row["update"])
    mean = np.mean(np.subtract(row["sampler_logp"], row["teacher_logp"]))
    assert summary["gap"] == pytest.approx(mean)
    assert "".join(row["tokens"]).startswith(summary["response"])


def test_damaged_and_torn_rows_are_left_out(tmp_path: Path):
    path = tmp_path / "rollouts.jsonl"
    good = msgspec.json.encode(hostile_row(1, 1)).decode()
    short = json.loads(good) | {"sampler_logp": [0.0]}
    path.write_text(f"{good}\nnothing\n[[[[\n{json.dumps(short)}\n{good}\n{good[:40]}")
    index = RolloutIndex(path)
    index.read()
    assert (len(index), index.damaged) == (2, 3)
    assert json.loads(index.row(1)) == json.loads(good)
    with path.open("a") as stream:
        stream.write(good[40:] + "\n")
    index.read()
    assert len(index) == 3


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path):
    write_rollouts(tmp_path, range(5), 4)
    path = tmp_path / "rollouts.jsonl"
    index = RolloutIndex(path)
    index.read()
    part = path.with_suffix(".part")
    part.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:6]))
    part.rename(path)
    append_row(tmp_path, rollout_row(np.random.default_rng(9), 40, 77))
    with pytest.raises((LookupError, msgspec.DecodeError)):
        index.row(6)  # not read anew yet: another row stands there
    index.read()
    assert (len(index), index.epoch) == (7, 1)
    assert json.loads(index.row(6))["uid"] == 77


def test_a_row_that_is_not_there_is_refused(indexed: RolloutIndex):
    with pytest.raises(LookupError, match="rollout 48 is not there; there are 48"):
        indexed.row(48)
