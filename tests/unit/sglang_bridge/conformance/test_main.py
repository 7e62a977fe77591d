"""The command: its table and JSON, and its exit codes."""

import json
from pathlib import Path

import pytest

from sglang_bridge.conformance import main as command
from sglang_bridge.conformance import scores
from tests.support.toy_scorer import Late, ToyScorer, served


@pytest.fixture(autouse=True)
def few_checks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command.scores, "CHECKS", (scores.sums_to_one, scores.ignores_itself))
    monkeypatch.setattr(command.refusals, "CHECKS", ())


def test_a_table_and_0_where_all_holds(capsys: pytest.CaptureFixture[str]):
    with served(ToyScorer()) as url:
        assert command.main([url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["holds", "holds", "2"]
    assert lines[-1] == "2 of 2 hold"


def test_json_and_1_where_something_fails(capsys: pytest.CaptureFixture[str]):
    with served(Late()) as url:
        assert command.main([url, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [(each["check"], each["holds"]) for each in told] == [
        ("sums to one", True),
        ("ignores itself", False),
    ]
    assert told[1]["measured"] > 1 > told[1]["limit"]


def test_1_and_one_line_where_nothing_answers(capsys: pytest.CaptureFixture[str]):
    assert command.main(["http://127.0.0.1:9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: http://127.0.0.1:9/weights_checker: no answer")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["127.0.0.1:1"], "URL must begin with http:// or https://, got '127.0.0.1:1'"),
        (["http://h", "--key-env", "NO_SUCH_KEY"], "a variable that is set, got NO_SUCH_KEY"),
        (["http://h", "--model", "/nowhere"], "a checkpoint's directory, got /nowhere"),
        ([], "URL"),
    ],
)
def test_bad_usage_is_2(words: list[str], why: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_the_oracle_is_transformers_in_float64(dense: Path):
    """Of a checkpoint, against float32: near, and not the same."""
    import numpy as np

    from sglang_bridge.conformance.oracle import Oracle
    from tests.support.oracles import load_reference, log_softmax, reference_logits

    ids = [3, 1, 4, 1, 5, 9]
    rows_TV = Oracle(dense).rows(ids)
    assert rows_TV.dtype == np.float64
    np.testing.assert_allclose(np.exp(rows_TV).sum(-1), 1, atol=1e-12)
    expected_TV = log_softmax(reference_logits(load_reference(dense), ids[:-1]))
    np.testing.assert_allclose(rows_TV, expected_TV, atol=1e-4)
