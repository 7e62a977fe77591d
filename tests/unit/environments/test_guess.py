"""The guessing game says of each guess whether it is too low, and rewards the right one."""

import asyncio

import pytest

from megatron_opd.environments.calls import Reply
from megatron_opd.environments.guess import GuessEnvironment
from megatron_opd.environments.protocol import EnvironmentRow, TrajectoryEnd


def game(*turns: str, **options) -> list[object]:
    async def run():
        environment = GuessEnvironment(**options)
        said = [await environment.start(EnvironmentRow("", "42"))]
        return said + [await environment.step(Reply(n, text)) for n, text in enumerate(turns)]

    return asyncio.run(run())


def test_a_game():
    said = game("Is it 50?", "Between 1 and 30", "no idea", "I say: 42!")
    assert said[0] == "I think of a whole number from 1 to 100. Guess it: you have 8 guesses."
    assert said[1:] == ["Too high.", "Too low.", "Say a whole number.", TrajectoryEnd(1.0)]


def test_the_game_is_lost_after_the_last_guess():
    assert game("1", "2", guesses=2)[1:] == ["Too low.", TrajectoryEnd(0.0)]
    assert game("1", "42", guesses=2)[2] == TrajectoryEnd(1.0)


def test_halving_always_wins():
    """Seven guesses are enough for a hundred numbers."""

    async def run(seed: int) -> int:
        environment, low, high = GuessEnvironment(guesses=7), 1, 100
        await environment.start(EnvironmentRow("", None, seed))
        while True:
            guess = (low + high) // 2
            said = await environment.step(Reply(0, str(guess)))
            if isinstance(said, TrajectoryEnd):
                assert said.reward == 1.0
                return guess
            low, high = (guess + 1, high) if said == "Too low." else (low, guess - 1)

    numbers = [asyncio.run(run(seed)) for seed in range(50)]
    assert numbers == [asyncio.run(run(seed)) for seed in range(50)]
    assert len(set(numbers)) > 20


@pytest.mark.parametrize("options", [{"low": 2, "high": 1}, {"guesses": 0}])
def test_options_that_make_no_game_are_refused(options):
    with pytest.raises(ValueError, match="low must be <= high and guesses >= 1"):
        GuessEnvironment(**options)
