"""A fault at every await of a run's start, middle and end is the cause that is told.

The awaits are found in the source: a new one is tried without a further line here, and one that no
scene below reaches fails a test.
"""

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from megatron_opd.errors import LearnerError, Preempted, RunFailed, UserError
from megatron_opd.fleet import clients, ends, guards, startup
from megatron_opd.inputs import teachers as teacher_guard
from megatron_opd.launch import processes, readiness
from megatron_opd.run import attempt, evaluations, own_servers, recover, run, start
from megatron_opd.weight_sync import session
from sglang_bridge.errors import BadReply, ServerRefused, ServerUnreachable
from tests.support.awaits import Faults, Place, instrument
from tests.support.cli_cases import small_config, tiny_models
from tests.support.figures import merge
from tests.support.scripted_run import (
    KILLED,
    Outcome,
    Scene,
    Script,
    in_directory,
    patched,
    perform,
    scene,
)

MODULES = [
    *(run, start, attempt, recover, own_servers, startup, readiness, guards, processes),
    *(teacher_guard, evaluations, session, ends, clients),
]
ELSEWHERE = {
    "another command": "launch.ray_submit",
    "replaced by the script": "launch.data_workers inputs.second_pass inputs.verifiers",
    "of the learner's batches": "run.batch_learner",
    "of a run under way": "fleet.elastic fleet.admission fleet.commands fleet.url_file",
    "of servers that come and go": "fleet.supervisor",
    "beside training, or after it": "run.checkpoints run.work_watch",
    "what notices a fault": "launch.health",
    "before the run": "run.pipeline",
    "of runs whose student speaks with an environment": "inputs.environments",
}
"""Modules whose awaits are none of a run's start, and why."""
ROOMS = ("run", "fleet", "launch", "inputs")
OTHER = (
    # of a run under way: servers and learners that are lost, that come and go
    *("startup.take_in", "Processes.remove", "Processes.put_another", "Processes.start_one"),
    *("Processes.restart_learner", "Processes.learner_died", "RunGuard.diagnose"),
    *("LearnerRestarts", "Training._lost", "Training._recover", "WeightSync.serve_on", "._serve"),
    *("WeightSync.start_over", "WeightSync.remove_server", "WeightSync.until_none_serves"),
    *("OwnServers.start_over", "OwnServers.remove_server"),
    # of memory that learner and servers share
    *("WeightSync.make_room", "WeightSync._make_room", "WeightSync.restore_memory"),
    # of checkpoints beside training
    *("EvaluatingKeeper",),
    # what is tested: but for its one await, of whatever ends a part
    *(
        "clients.close_fleets",
        "clients.close_fleets",
        "OwnServers.close",
        "FirstCause.of",
        "FirstCause._note",
        "ends._called",
        "ends.explained",
    ),
)
AWAITS = re.compile(r"^ +(.* )?(await|async with|async for)\b", re.MULTILINE)
UNRAISING = ("return_exceptions=True",)
"""Waits for tasks that were cancelled or stopped, and hands out no error of theirs."""
LATE = (
    "AsyncExitStack()",
    *(
        "rotate()",
        "export_best(",
        "turn.take_back",
        "_prepare_retry(error",
        "explained(",
        "_note(error",
    ),
    *("'continue'", "'reopen'", "health", "recover()", "lost(error)", "closing("),
)
"""Awaits behind a failure, or of options that come after training."""


def closes(place: Place) -> bool:
    """Whether this is the await of every end of a part, of the processes last."""
    return place.function.endswith("FirstCause.closing.closed")


def leaves_out(function: str, what: str) -> bool:
    other = any(name in function for name in OTHER)
    return other or any(words in what for words in (*UNRAISING, *LATE))


@dataclass(frozen=True)
class Kind:
    """A fault. raises: given the script. told: what the cause holds. ends: with what."""

    raises: Callable[[Script], BaseException | None]
    told: str
    ends: tuple[type[BaseException], ...] = (RunFailed, UserError)
    status: str = "failed"


def url_of(script: Script) -> str:
    return script.clients[0].url if script.clients else "http://nowhere:1"


def dying_server(script: Script) -> BaseException:
    """The student's server is killed, and all that is seen is its connection."""
    script.kill("student server")
    return ServerUnreachable(url_of(script), "/generate", "reset by peer: 104", sent=True)


def dying_learner(script: Script) -> BaseException:
    script.kill("the learner")
    return LearnerError("learner rank 0 is gone: 104", final=False)


def signalled(number: int, script: Script) -> None:
    """The signal comes while the run waits here."""
    os.kill(os.getpid(), number)


KINDS = {
    "bad input": Kind(lambda _: UserError("data: 104"), "data: 104", (UserError,)),
    "learner's words": Kind(lambda _: LearnerError("rank 0: no memory 104"), "no memory 104"),
    "learner silent": Kind(lambda _: LearnerError("no answer 104", final=False), "no answer 104"),
    "unforeseen": Kind(lambda _: ZeroDivisionError("by 104"), "by 104"),
    "error answer": Kind(lambda s: ServerRefused(url_of(s), "/g", 502, "104"), "HTTP 502: 104"),
    "html": Kind(lambda s: BadReply(f"{url_of(s)}: text/html 104"), "text/html 104"),
    "reset": Kind(lambda s: ServerUnreachable(url_of(s), "/g", "104", sent=True), "no answer (104"),
    "timeout": Kind(lambda _: TimeoutError("after 104 s"), "after 104 s"),
    "group": Kind(
        lambda _: ExceptionGroup("tasks", [ValueError("first 104"), ValueError("second")]),
        "first 104",
    ),
    "server dies": Kind(dying_server, "104"),
    "learner dies": Kind(dying_learner, "104"),
    "cancelled": Kind(lambda _: asyncio.CancelledError("104"), "cancelled"),
    "interrupt": Kind(partial(signalled, signal.SIGINT), "", (KeyboardInterrupt,), "interrupted"),
    "preempt": Kind(partial(signalled, signal.SIGTERM), "SIGTERM", (Preempted,), "preempted"),
}


pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
"""A fault is put in the place of an await whose arguments may be awaitables themselves."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    root = tmp_path_factory.mktemp("scenes")
    tree = small_config(root, tiny_models(root / "models"))
    short = {"max_total_tokens": 8192, "startup_timeout_s": 5, "max_restarts": 0}
    tree["student"] |= {**short, "dtype": "float32"}
    tree["teacher"] |= {**short, "dtype": "float32"}
    tree["learner"] = {"max_restarts": 0}
    tree["scoring"] = {"guard": "warn"}
    tree["rollout"] = {"max_new_tokens": 8, "attempts": 1}
    tree["evaluation"] = {"problems": 1, "samples": 1}
    tree["data"]["heldout"] = tree["data"]["train"]
    tree["metrics"] = {"trace": False, "tensorboard": False, "progress": False}
    urls = {
        role: tree[role] | {"urls": [f"http://127.0.0.1:{port}"]}
        for port, role in enumerate(("student", "teacher"), 9001)
    }
    remote = {**tree, **urls, "learner": {"max_restarts": 0, "listen_port": 1}}
    sites = {**tree, "sites": {"members": {"far": {}}}, "evaluation": {"problems": 0}}
    sites["weight_sync"] = {"type": "disk", "directory": str(root / "versions")}
    return {
        "run": scene(tree | {"workers": {"count": 1}}),
        "mixed": scene(tree | {"student": urls["student"]}),
        "control": scene(remote, starts=False),
        "late": scene(remote, starts=False, late=True),
        "resume": scene(tree, resumes=True),
        "used": scene(remote, starts=False, resumes=True),
        "sites": scene(sites),
    }


@dataclass
class Stage:
    """Performs scenes with faults."""

    scenes: dict[str, Scene]
    directory: Path
    faults: Faults
    places: list[Place]
    patch: pytest.MonkeyPatch
    number: int = 0
    script: Script = field(init=False)

    def play(
        self, name: str, *at: Place, kind: Kind | None = None, nth: int | None = None
    ) -> Outcome:
        """Perform a scene, with a fault at some of its awaits. nth: at that pass alone."""
        self.number += 1
        directory = self.directory / str(self.number)
        played = in_directory(self.scenes[name], directory)
        script = self.script = Script(played.config)
        self.faults.at, self.faults.nth = frozenset(at), nth
        self.faults.reached = Counter()

        async def raises() -> BaseException:
            assert kind is not None
            error = kind.raises(script)
            if error is None:  # it comes as a cancellation
                await asyncio.sleep(1e6)
            assert error is not None
            return error

        self.faults.raises = raises
        with pytest.MonkeyPatch.context() as patch:
            patched(patch, script, played)
            return perform(played, directory, script)


@pytest.fixture
def stage(scenes: dict[str, Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    faults = Faults(after=closes)
    places = instrument(MODULES, faults, monkeypatch, leaves_out)
    return Stage(scenes, tmp_path, faults, places, monkeypatch)


def test_every_module_that_awaits_is_tried_or_named():
    house = Path(run.__file__).parents[1]
    awaiting = {
        f"{room}.{path.stem}"
        for room in ROOMS
        for path in house.joinpath(room).glob("*.py")
        if re.search(AWAITS, path.read_text())
    }
    tried = {module.__name__.removeprefix("megatron_opd.") for module in MODULES}
    tried -= {"weight_sync.session"}
    named = {name for names in ELSEWHERE.values() for name in names.split()}
    assert awaiting == tried | named


def test_every_await_is_reached(stage: Stage):
    reached: set[Place] = set()
    for name in stage.scenes:
        outcome = stage.play(name)
        assert outcome.ended is None, (name, outcome.said, outcome.ended)
        assert (outcome.cause, outcome.left) == (None, [])
        claims = [claim for client in stage.script.clients for claim in client.claims]
        assert len(claims) == len(stage.script.clients), "each server is claimed once"
        assert len({claim.run for claim in claims}) == bool(claims)
        assert [claim.writes for claim in claims].count(True) == bool(claims), "the student's"
        reached.update(stage.faults.reached)
    missed = [str(place) for place in stage.places if place not in reached]
    assert not missed, "no scene reaches these awaits: add one, or say why they are none"


@dataclass(frozen=True)
class Case:
    """A scene with a fault at one of its awaits. nth: at that pass alone. last: the last one."""

    scene: str
    place: Place
    nth: int | None = None
    last: bool = False


def cases(stage: Stage) -> Iterator[Case]:
    """Yield every await once, in a scene that reaches it, and every end of a part of two scenes."""
    found: set[Place] = set()
    for name in stage.scenes:
        stage.play(name)
        for place, passes in stage.faults.reached.copy().items():
            if closes(place):
                if name in ("run", "sites"):
                    yield from (Case(name, place, n, n == passes - 1) for n in range(passes))
            elif place not in found:
                found.add(place)
                yield Case(name, place)


@pytest.mark.parametrize("name", KINDS)
def test_a_fault_at_every_await_is_the_cause_that_is_told(stage: Stage, name: str):
    kind, wrong, tried = KINDS[name], [], 0
    signals = kind.status != "failed"
    for case in list(cases(stage)):
        if signals and case.last:
            continue  # what is ending ends, whatever is sent to it
        outcome = stage.play(case.scene, case.place, kind=kind, nth=case.nth)
        words, tried = kind.told, tried + 1
        killed = [p.name for p in stage.script.processes if p.code == KILLED]
        # the learner ends then because it is to; the last part to end is the processes
        over = case.last or (name == "learner dies" and closes(case.place))
        if killed and not over:
            words = f"{killed[0]} ended with signal 9"
        told = outcome.cause if outcome.summary is not None else str(outcome.ended)
        right = isinstance(outcome.ended, kind.ends) and words in (told or "")
        if outcome.summary is not None:
            right = right and outcome.summary["status"] == kind.status
        if isinstance(outcome.ended, Exception):
            right = right and words in str(outcome.ended)
        if not right or outcome.left:
            wrong.append(f"{case}: {outcome.ended!r}, left: {outcome.left}")
    assert not wrong, "\n".join(wrong)
    merge("faults at an await that were not told as the cause", len(wrong), 1, tried)


def test_what_fails_at_the_end_hides_no_cause_and_keeps_nothing_running(stage: Stage):
    """Every part fails when it is closed, after an update failed and after none did."""
    stage.play("run")
    (closing,) = (place for place in stage.faults.reached if closes(place))
    (update,) = (place for place in stage.faults.reached if "controller.run()" in place.what)
    for at in ((update, closing), (closing,)):
        numbers = iter(range(1000))
        kind = Kind(lambda _, numbers=numbers: ValueError(f"number {next(numbers)}"), "")
        outcome = stage.play("run", *at, kind=kind)
        assert "number 0" in str(outcome.ended)
        assert "number 0" in (outcome.cause or "")
        assert next(numbers) == sum(stage.faults.reached[place] for place in at) > 6
        assert outcome.left == []
