"""What a machine lacks is skipped with its reason, and fails in continuous integration."""

import pytest

from tests.support import features


@pytest.mark.parametrize(
    ("ci", "outcome"),
    [
        (None, pytest.skip.Exception),
        ("false", pytest.skip.Exception),
        ("true", pytest.fail.Exception),
    ],
)
def test_a_missing_feature_is_skipped_and_fails_where_ci_is_set(
    ci: str | None, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    reasons = {"wings": lambda: "it is a test", "legs": lambda: None}
    monkeypatch.setattr(features, "REASONS", reasons)
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    features.require("legs")
    with pytest.raises(outcome, match="no wings on this machine: it is a test"):
        features.require("wings")
