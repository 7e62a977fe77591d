"""Runs of the trained arithmetic models, on servers that they share.

One learns from a mixture of a saved data set and a table, and ends when one of them is used up; one
learns from rewards alone; one plays trajectories of several turns.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megatron_opd.config.environment import UserConfig
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.data.render import Rendering
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.environments.user import SimulatedUser, UserPart
from megatron_opd.evaluation import evaluate as opd_eval
from megatron_opd.evaluation.reports import EvaluationReport
from megatron_opd.inputs.tokenizers import load_tokenizer
from megatron_opd.launch.processes import Processes
from megatron_opd.rollout.user_voice import TeacherVoice
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from tests.e2e.conftest import ARITHMETIC, Sections
from tests.e2e.games import GAME, trained_games, versions_of_turns
from tests.e2e.runs import START_TIMEOUT_S, UPDATES, Finished, Running, write_config
from tests.support.figures import bounded

pytestmark = pytest.mark.e2e

ROWS, BATCH, MOST = 24, 8, 20
HALVES = "Halve what is left."


def write_sources(root: Path) -> list[dict[str, object]]:
    """Chats that end before the result, saved as `datasets` does; and short rows as a table."""
    lines = (ARITHMETIC / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[: 2 * ROWS]]
    chats = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "answer": row["answer"],
            "ends": ["\n#"],
        }
        for row in rows[:ROWS]
    ]
    (root / "chats").mkdir()
    table = pyarrow.Table.from_pylist(chats)
    with pyarrow.ipc.new_stream(root / "chats" / "data.arrow", table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (root / "chats" / "state.json").write_text(json.dumps(state))
    short = [{"prompt": row["prompt"], "answer": row["answer"], "most": 8} for row in rows[ROWS:]]
    parquet.write_table(pyarrow.Table.from_pylist(short), root / "short.parquet")
    return [
        {"path": str(root / "chats"), "weight": 2},
        {"path": str(root / "short.parquet"), "weight": 1},
    ]


def check(done: Finished, updates_before: int, epochs: int) -> int:
    """What both attempts leave behind; returns the updates made."""
    assert done.code == 0, done.output
    summary = done.summary
    updates = summary["updates"]
    assert summary["status"] == "finished"
    assert updates_before < updates < MOST
    assert summary["version"] == updates == len(done.rows)
    assert f"data.train is used up after {updates} updates: data.epochs {epochs}" in done.output
    assert summary["samples_consumed"] == updates * BATCH
    assert set(summary["samples_dropped"]) <= {"incomplete_batch"}
    assert summary["samples_in_flight"] == 0
    assert max(summary["data_epochs"].values()) == epochs
    assert (done.run_dir / "checkpoints" / f"step-{updates:06d}").is_dir()
    return updates


def test_a_run_ends_with_its_data_and_goes_on_with_more_epochs(
    inputs: Path, tmp_path: Path, arithmetic: Sections, start: Callable[..., Running]
):
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": MOST},
        data={
            "train": write_sources(tmp_path),
            "task": "arithmetic",
            "chat_template": True,
            "epochs": 1,
            "stop_key": "ends",
            "max_new_tokens_key": "most",
        },
        **arithmetic,
        rollout={"max_new_tokens": 64},
        buffer={"batch_size": BATCH},
        evaluation={"problems": 0},
        checkpoint={"export_hf": False},
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    updates = check(done, 0, 1)
    assert f"note: data.train lasts for {updates} updates with data.epochs 1" in done.output
    # of the chats most end before their result, every short row is cut at its own limit
    read = done.summary["data_epochs"]
    short = read[str(tmp_path / "short.parquet")] * ROWS
    assert done.summary["length_stops"] >= short - BATCH
    assert done.summary["stop_string_stops"] >= ROWS // 2

    opd = [sys.executable, "-m", "megatron_opd", "run", str(config), "--resume"]
    again = subprocess.run(opd, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "data.epochs must be above 1, as the data was used up" in again.stderr
    more = [*opd, "--set", "data.epochs=2"]
    ended = subprocess.run(
        more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    check(Finished(tmp_path / "run", ended.returncode, ended.stdout), updates, 2)


def test_rewards_alone_need_no_teacher(
    inputs: Path, tmp_path: Path, arithmetic: Sections, start: Callable[..., Running]
):
    """GRPO on the arithmetic example; warm enough that the answers to one prompt differ.

    Data workers sample and judge them.
    """
    config = write_config(
        inputs,
        tmp_path,
        data={"train": str(ARITHMETIC / "train.jsonl"), "task": "arithmetic"},
        student=arithmetic["student"],
        teacher=None,
        support={"type": "path"},
        objective={"type": "grpo"},
        rollout={"group_size": 8, "max_new_tokens": 64, "temperature": 1.6},
        buffer={"batch_size": 32},
        workers={"count": 2},
        evaluation={"problems": 0},
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert logs == {"learner.log", "data-worker-0.log", "data-worker-1.log"}
    summary = done.summary
    assert summary["samples_consumed"] == UPDATES * 32
    assert 0 < summary["reward_mean"] < 1
    assert summary["reward_uniform_group_fraction"] < 1, "some group has something to teach"
    assert summary["cached_ids_per_token"] == summary["distinct_ids_per_token"] == 1
    assert summary["teacher_accuracy_pct"] is None
    assert all("reverse_kl_nats" not in row for row in done.rows)
    moving = [row["grad_norm"] > 0 for row in done.rows]
    assert moving == [row["reward_uniform_group_fraction"] < 1 for row in done.rows]
    bounded("opd run: max |p_learner - p_sampler|", summary["probs_diff_max"], 1e-4, "grpo")


def evaluated_again(
    config: Path, url: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, EvaluationReport]:
    """What `opd eval` finds on a server that is there already, and holds the model."""
    server = SimpleNamespace(spec=SimpleNamespace(url=url))
    monkeypatch.setattr(opd_eval, "ServerProcess", lambda *_: server)
    monkeypatch.setattr(opd_eval, "Processes", lambda *_: Processes([], None))
    return opd_eval.evaluate_checkpoint(load_config(Config, config), model)


def check_evaluated(evaluated: list[dict[str, Any]]) -> None:
    """Check rows of three problems of the game, twice each, with training waiting."""
    for row in evaluated:
        assert (row["version_min"], row["version_max"]) == (row["update"], row["update"])
        assert (row["problems"], row["samples"], row["verifier_failures"]) == (3, 2, {})
        assert row["mean_reward"] == pytest.approx(row["accuracy_pct"] / 100)
        assert 1 <= row["mean_turns"] <= 3
        assert row["mean_response_tokens"] > row["mean_turns"], "of all turns"
        assert row["mean_tool_calls"] == row["mean_call_errors"] == 0


def test_a_student_guesses_turn_by_turn(
    inputs: Path,
    tmp_path: Path,
    arithmetic: Sections,
    start: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
):
    """Trajectories, distilled, rewarded and evaluated; the environment has processes of its own.

    Its reward is that of the last turn, and is learnt from as such.
    """
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(f'{{"prompt": "round {n}"}}\n' for n in range(3)))  # no answers
    mixture = [
        {"coefficient": 1.0, "objective": {"type": "reverse_kl"}},
        {"coefficient": 0.5, "objective": {"type": "grpo"}},
    ]
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 2},
        data={
            "train": str(ARITHMETIC / "train.jsonl"),
            "heldout": str(held_out),
            "chat_template": True,
        },
        **arithmetic | {"teacher": {**arithmetic["teacher"], "system_prompt": HALVES}},
        environment=GAME | {"credit": "turn"},
        schedule={"in_flight": "keep"},
        objective={"type": "mixture", "terms": mixture},
        rollout={"group_size": 4, "max_new_tokens": 24},
        buffer={"batch_size": 8},
        learner={"max_tokens_per_microbatch": 1024, "optimizer": {"lr": 1e-5}},
        evaluation={"problems": 3, "samples": 2, "every": 1, "blocks": True},
        checkpoint={"keep_best": True},
        metrics={"rollouts": 8},
    )
    done = start(config).finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    summary = done.summary
    assert summary["status"] == "finished"
    assert summary["samples_consumed"] == 16
    assert summary["samples_in_flight"] == 0
    bounded("opd run: max |p_learner - p_sampler|", summary["probs_diff_max"], 1e-4, "turns")
    for row in done.rows:
        assert 1 < row["turns_mean"] <= 3
        assert row["given_tokens_mean"] > row["turns_mean"]
        assert 0 < row["turn_rewarded_fraction"] < 1
    trained = trained_games(done.run_dir)
    assert len(trained) == 16
    assert all(row["reward"] in (0.0, 1.0, None) for row in trained)
    for row in trained:
        assert len(row["teacher_logp"]) == len(row["tokens"])
        assert row["teacher_prompt"].count(HALVES) == 1
        assert row["teacher_prompt"].endswith(row["prompt"])
        assert all(len(versions) == 1 for versions in versions_of_turns(row)), "each is finished"
    evaluated = [json.loads(line) for line in (done.run_dir / "evaluations.jsonl").open()]
    assert [row["update"] for row in evaluated] == [0, 1, 2]
    check_evaluated(evaluated)
    picked = summary["evaluation_sets"]["heldout"]
    assert (picked["before"], picked["after"]) == (evaluated[0], evaluated[2])
    assert "teacher: avg@2" in done.output
    assert f"{evaluated[2]['mean_turns']:.1f} turns, mean reward" in done.output
    (url,) = arithmetic["student"]["urls"]
    final = done.run_dir / "checkpoints" / "final"
    again = evaluated_again(config, url, final, monkeypatch)["heldout"].as_dict()
    same = again.keys() - {"version_min", "version_max"}
    assert {key: again[key] for key in same} == {key: evaluated[2][key] for key in same}


def test_a_teacher_plays_the_user(
    inputs: Path, tmp_path: Path, arithmetic: Sections, monkeypatch: pytest.MonkeyPatch
):
    """A teacher's server samples plain turns by their seeds, at a temperature of their own.

    So it does for `opd eval`.
    """
    model, (url,) = ARITHMETIC / "teacher", arithmetic["teacher"]["urls"]
    tokenizer: Any = load_tokenizer(model, "teacher.model")
    end: int = tokenizer.eos_token_id
    user = UserConfig(instructions="{prompt}", greeting="=", max_user_tokens=16, temperature=9.0)
    encoder = TurnEncoder(tokenizer, Rendering(chat_template=True), [end])
    part = UserPart(user, encoder, 249, "teacher")

    async def said(seeds: Sequence[int]) -> list[str]:
        async with Fleet([ServerClient(url, timeout_s=60.0)]) as fleet:
            voice, found = TeacherVoice(user, 1, fleet, [end]), list[str]()
            for seed in seeds:
                speaks = SimulatedUser(part, voice)
                await speaks.start(EnvironmentRow("54+45=\n", seed=seed))
                answered = await speaks.step(Reply(0, "4+5-0=9b0\n"))
                found += [message.content for message in answered.messages]
            return found

    first, again, other = asyncio.run(said([1, 1, 2]))
    assert first == again != other
    tokens = re.findall(r"<unused\d+>|.", first, re.DOTALL)  # the names of ids without a text
    assert 1 < len(tokens) <= 16

    played = {"type": "user", "max_turns": 3, "max_tokens": 240}
    played |= {"instructions": "{prompt}", "greeting": "=", "max_user_tokens": 16}
    train = str(ARITHMETIC / "train.jsonl")
    config = write_config(
        inputs,
        tmp_path,
        data={"train": train, "heldout": train, "task": "arithmetic", "chat_template": True},
        **arithmetic,
        environment=played,
        rollout={"max_new_tokens": 64},
        evaluation={"problems": 4, "samples": 1},
    )
    (own,) = arithmetic["student"]["urls"]
    found = evaluated_again(config, own, ARITHMETIC / "student", monkeypatch)["heldout"].as_dict()
    assert found["problems"] == 4
    assert 1 < found["mean_turns"] <= 3, found


def test_agents_with_the_openai_package_some_of_which_are_slow(
    inputs: Path, tmp_path: Path, arithmetic: Sections, start: Callable[..., Running]
):
    """One of eight waits for others to finish, and would be dropped if it stopped them."""
    finished = tmp_path / "finished"
    finished.mkdir()
    agent = {"type": "agent", "function": "tests.support.openai_agents:run", "timeout_s": 120}
    arguments = {"slow_every": 8, "finished": str(finished)}
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 2},
        data={"train": str(ARITHMETIC / "train.jsonl"), "heldout": None, "chat_template": True},
        **arithmetic,
        environment=agent | {"max_tokens": 240, "arguments": arguments},
        rollout={"max_new_tokens": 64},
        buffer={"batch_size": 12},
        learner={"max_tokens_per_microbatch": 1024},
        schedule={"in_flight": "abort"},
        evaluation={"problems": 0},
        metrics={"rollouts": 12},
    )
    done = start(config).finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    summary = done.summary
    assert summary["status"] == "finished"
    assert summary["samples_consumed"] == 24
    assert summary["samples_in_flight"] == 0
    assert summary["samples_dropped"] == {}
    slow = 24 - sum(int(path.name) % 8 > 0 for path in finished.iterdir())
    assert slow > 0, "some were slow, and are trained on all the same"
    bounded("opd run: max |p_learner - p_sampler|", summary["probs_diff_max"], 1e-4, "agents")
    for row in done.rows:
        assert row["turns_mean"] == 4
        assert row["sequences_mean"] == 3
        assert (row["branches_new_mean"], row["branches_sibling_mean"]) == (1, 1)
        assert row["settings_ignored_mean"] == 1
        assert row["branches_edited_mean"] == 0, "an answer that is sent back is known"
    assert summary["reward_mean"] > 0
    rows = [json.loads(line) for line in (done.run_dir / "rollouts.jsonl").open()]
    assert len(rows) == 24
    for row in rows:
        assert all(len(versions) == 1 for versions in versions_of_turns(row)), "or thrown away"


def test_a_teacher_of_somebody_else_scores_and_writes(
    inputs: Path, tmp_path: Path, arithmetic: Sections, start: Callable[..., Running]
):
    """Asked through SGLang's own routes; it answers a quarter of the prompts, and scores."""
    written = {"type": "sft_on_teacher", "share": 0.25, "temperature": 0.0}
    config = write_config(
        inputs,
        tmp_path,
        run={"max_steps": 3},
        data={"train": str(ARITHMETIC / "train.jsonl"), "heldout": None, "task": "arithmetic"},
        student=arithmetic["student"],
        teacher=arithmetic["teacher"] | {"api": "sglang"},
        support={"type": "path"},
        objective={
            "type": "mixture",
            "terms": [
                {"coefficient": 0.5, "objective": written},
                {"objective": {"type": "reverse_kl"}},
            ],
        },
        learner={"optimizer": {"lr": 1e-4}},
        evaluation={"problems": 0},
        scoring={"guard": "refuse"},
        metrics={"rollouts": BATCH},
    )
    done = start(config).finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    assert "teacher: scores agree with sampling" in done.output
    assert done.summary["samples_consumed"] == 3 * BATCH
    assert done.summary["samples_dropped"] == {}
    bounded("opd run: max |p_learner - p_sampler|", done.summary["probs_diff_max"], 1e-4, "sft")
    rows = [json.loads(line) for line in (done.run_dir / "rollouts.jsonl").open()]
    trained = [row for row in rows if row.get("update") is not None]
    theirs = [row for row in trained if row["uid"] % 4 == 3]
    assert len(trained) == 4 * len(theirs) == 3 * BATCH
    assert {row["engine"] for row in theirs} == set(arithmetic["teacher"]["urls"])
    assert all(row["reward"] is None for row in theirs)
    own = [row for row in trained if row not in theirs]
    assert {row["engine"] for row in own} == set(arithmetic["student"]["urls"])
    assert all(row["teacher_logp"] and row["reward"] is not None for row in own)
