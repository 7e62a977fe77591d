"""A fake learner's checkpoints, written as a run would write them."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from megatron_opd.checkpoint.run_lock import LockClaim
from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.checkpoint.state_files import write_sums
from megatron_opd.config.load import dump_config
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data.epochs import Stretch
from megatron_opd.data.template import RunTemplate
from megatron_opd.evaluation.progress import EvaluationProgress
from megatron_opd.inputs.kept_data import KeptData, Shape, data_now
from megatron_opd.run.checkpoints import Checkpoints

BEGUN = RunTemplate()


class FakeLearner:
    """Writes one file per rank, later than it answers if told to."""

    def __init__(self, ranks: int = 1, fail: str | None = None, delay_s: float = 0.0) -> None:
        self.ranks, self.fail, self.delay_s = ranks, fail, delay_s
        self.tasks: list[asyncio.Task[None]] = []

    async def save_state(self, path: Path, updates: int, *, in_background: bool) -> None:
        await asyncio.to_thread(path.mkdir)
        writing = asyncio.create_task(self._write(path, updates))
        self.tasks.append(writing)
        if not in_background:
            await writing

    async def _write(self, path: Path, updates: int) -> None:
        await asyncio.sleep(self.delay_s)
        for rank in range(self.ranks):
            if self.fail is not None and rank == self.ranks - 1:
                (path / f"failed-{rank:05d}").write_text(self.fail)
                return
            (path / f"__{rank}_0.distcp").write_bytes(b"w" * (100 + updates))
            write_sums(path, rank, [f"__{rank}_0.distcp"])


def make_config(tmp_path: Path, **sections: Any) -> Config:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    server = {"model": "unused", "dtype": "float32"}
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run"), "max_steps": 20},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "student": server,
        "teacher": server,
        "checkpoint": {"every": 2},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


async def at(updates: int) -> ControllerState:
    return ControllerState(updates, updates, updates, updates, {}, 0, updates, [])


def kept_data(config: Config) -> Any:
    counts = (1,) * len(config.data.train)
    weights = tuple(file.weight for file in config.data.train)
    sources = (1,) if None in weights else counts
    epochs = tuple((Stretch(0, 0, count),) for count in sources)
    kept = KeptData(data_now(config), Shape(weights, (counts,), epochs))
    return msgspec.to_builtins(kept)


def save_some(
    config: Config,
    learner: FakeLearner,
    updates: list[int],
    claim: LockClaim | None = None,
    *,
    since: int = 0,
    at_end: int | None = None,
    evaluations: Any = None,
    template: RunTemplate = BEGUN,
) -> Checkpoints:
    """Checkpoints after each of `updates`, as a run would make them.

    since: updates of the checkpoint that it was continued from. at_end: those after which it ends
    early. evaluations: which checkpoints they want. template: what it renders chats
    with. It knows of data.train as if every file had one prompt.
    """
    dirs = StepDirs(config.run.dir / "checkpoints")
    config.run.dir.mkdir(exist_ok=True)
    (config.run.dir / "config.resolved.yaml").write_text(dump_config(config))
    extras: dict[str, Any] = {"elapsed_s": 1.0, "wall_s": 1.0, "resumed_at_updates": []}
    extras |= {"evaluations": EvaluationProgress().as_json(), "totals": {}}
    extras["template"] = template.as_json()
    parts = (dirs, config, learner, lambda: extras, lambda line: None, claim, since)
    kept = Checkpoints(*parts, evaluations=evaluations)

    async def main() -> None:
        extras["data"] = kept_data(config)
        for done in updates:
            if kept.due(done):
                await kept.after_update(done, lambda done=done: at(done))
        if at_end is not None:
            await kept.at_end(at_end, lambda: at(at_end))
        await kept.finish()

    asyncio.run(main())
    return kept
