"""A game of several turns that small models play, and what rollouts.jsonl must tell of it."""

import json
import re
from pathlib import Path
from typing import Any

LOW, HIGH, GUESSES = 1, 50, 3
GAME = {"type": "guess", "low": LOW, "high": HIGH, "guesses": GUESSES, "max_tokens": 240}
"""Section environment."""
_END = re.compile("<[a-z0-9]+>$")
"""The name of the token that ends a turn, which is no part of what is said."""
_SAYS = ("Too low.", "Too high.", "Say a whole number.")


def trained_games(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of games that were trained on, each checked; some have several turns."""
    rows = [json.loads(line) for line in (run_dir / "rollouts.jsonl").open()]
    trained = [row for row in rows if row["version"] is not None]
    for row in trained:
        check_game(row)
    assert sum(len(row["turns"]) > 1 for row in trained) >= len(trained) / 2
    return trained


def check_game(row: dict[str, Any]) -> None:
    """What was said to each turn fits the tokens that are trained on, as does the reward.

    No number that was thought of would be right where a turn's tokens were another's.
    """
    assert row["prompt"].count(f"I think of a whole number from {LOW} to {HIGH}.") == 1
    starts = [turn["start"] for turn in row["turns"]]
    assert starts == [0, *(at for at, _ in row["given"])]
    assert 1 <= len(starts) <= GUESSES
    stops = [*starts[1:], len(row["tokens"])]
    turns = ["".join(row["tokens"][a:b]) for a, b in zip(starts, stops, strict=True)]
    texts = [_END.sub("", turn) for turn in turns]
    guesses = [re.findall(r"-?\d{1,18}", text) for text in texts]
    above, below = -1e20, 1e20
    for guessed, (_, given) in zip(guesses, row["given"], strict=False):
        (said,) = (words for words in _SAYS if words in given)
        assert (said == "Say a whole number.") == (not guessed)
        if said == "Too low.":
            above = max(above, int(guessed[-1]))
        elif said == "Too high.":
            below = min(below, int(guessed[-1]))
    assert above < below - 1, "there is a number between"
    *earlier, last = [turn["reward"] for turn in row["turns"]]
    assert set(earlier) <= {None}
    if last is None:
        assert row["finish_reason"] == "length", "its last turn was cut"
    else:
        assert last == row["reward"]
    if last == 1.0:
        assert above < int(guesses[-1][-1]) < below
    elif last == 0.0:
        assert len(turns) == GUESSES
    assert row["spans"][-1][2] == len(row["tokens"]) == len(row["sampler_logp"])
    seconds = [turn["sampling_s"] + turn["environment_s"] for turn in row["turns"]]
    assert 0 < sum(seconds) <= row["played_s"] + 0.01


def versions_of_turns(row: dict[str, Any]) -> list[set[int]]:
    """The versions that sampled each turn."""
    starts = [turn["start"] for turn in row["turns"]]
    stops = [*starts[1:], len(row["tokens"])]
    return [
        {version for version, start, stop in row["spans"] if start < b and stop > a}
        for a, b in zip(starts, stops, strict=True)
    ]
