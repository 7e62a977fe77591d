"""What signals do to a run, sent for real to this process."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from megatron_opd.errors import Preempted
from megatron_opd.launch.stopping import Stopping

SOON_S, LATE_S = 0.05, 30.0


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


class Training:
    """Ends `after_s` after it was asked to, or fails then."""

    def __init__(self, after_s: float, error: Exception | None = None) -> None:
        self.after_s, self.error = after_s, error
        self.asked = asyncio.Event()
        self.kept = False

    async def run(self) -> None:
        await self.asked.wait()
        await asyncio.sleep(self.after_s)
        if self.error is not None:
            raise self.error
        self.kept = True


def ended_by(
    happens: Callable[[], None], training: Callable[[], Training], grace_s: float = LATE_S
) -> tuple[BaseException, Training, list[str]]:
    """How a run ends in whose training that happens."""
    said: list[str] = []

    async def main() -> tuple[BaseException, Training]:
        stopping, part = Stopping(grace_s, said.append), training()
        try:
            with stopping.heeded():
                asyncio.get_running_loop().call_later(SOON_S, happens)
                with stopping.after(part.asked.set):
                    await part.run()
        except (KeyboardInterrupt, Preempted) as ended:
            send(signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # what is ending can end
            await asyncio.sleep(SOON_S)
            return ended, part
        raise AssertionError("it was told to end")

    ended, part = asyncio.run(main())
    return ended, part, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_preempted_ends_after_its_checkpoint(number: signal.Signals):
    """Before: SIGTERM ended it at once, and SIGUSR1 killed it and left its servers."""
    ended, training, said = ended_by(lambda: send(number), lambda: Training(SOON_S))
    assert training.kept
    assert (type(ended), str(ended)) == (Preempted, number.name)
    assert said == [f"{number.name}: the run ends after a checkpoint, within 30 s"]


def test_a_second_signal_and_the_end_of_the_grace_end_it_at_once():
    def twice() -> None:
        send(signal.SIGUSR1)
        asyncio.get_running_loop().call_later(SOON_S, lambda: send(signal.SIGTERM))

    for happens, grace_s in ((twice, LATE_S), (lambda: send(signal.SIGUSR1), SOON_S)):
        ended, training, _ = ended_by(happens, lambda: Training(LATE_S), grace_s)
        assert not training.kept
        assert (type(ended), str(ended)) == (Preempted, "SIGUSR1, without a further checkpoint")


def test_what_fails_after_a_preemption_costs_the_checkpoint_alone():
    """A scheduler may have ended the learner too: it must not be started again."""
    lost = RuntimeError("rank 0 is gone")
    ended, _, _ = ended_by(lambda: send(signal.SIGTERM), lambda: Training(SOON_S, lost))
    assert isinstance(ended, Preempted)
    assert str(ended) == "SIGTERM, without a further checkpoint: rank 0 is gone"


def test_ctrl_c_makes_no_checkpoint():
    ended, training, said = ended_by(lambda: send(signal.SIGINT), lambda: Training(SOON_S))
    assert isinstance(ended, KeyboardInterrupt)
    assert (training.kept, said) == (False, [])


def test_a_run_that_does_not_train_has_nothing_to_keep():
    async def main(after: Callable[[Stopping], Awaitable[None]]) -> None:
        stopping = Stopping(LATE_S, print)
        with stopping.heeded():
            await after(stopping)
            send(signal.SIGTERM)
            await asyncio.sleep(LATE_S)

    async def nothing(stopping: Stopping) -> None:
        """It has not begun."""

    async def training(stopping: Stopping) -> None:
        with stopping.after(lambda: None):
            """It is over."""

    for after in (nothing, training):
        with pytest.raises(Preempted, match="SIGTERM, without a further checkpoint"):
            asyncio.run(main(after))


def test_errors_of_a_run_that_nobody_preempted_stay_errors():
    async def main() -> None:
        stopping = Stopping(LATE_S, print)
        with stopping.heeded(), stopping.after(lambda: None):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())
