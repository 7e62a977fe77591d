"""Brings data in every form: files with weights, formats, epochs, chats, and what a row may say."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from statistics import fmean

import pyarrow
import yaml
from pyarrow import parquet

from checks.bring.item import Item, Ran, Tree, response_of, write_jsonl
from harness.small_run import BATCH, LIMIT, ROWS, problems, small

SYSTEM, MARK = "Add.", "!"
SHORTEST = 8
ENDS = "\n#"
SOURCE = '''"""A source of one's own: rows as mappings, the same ones every time."""
import json
from pathlib import Path
def rows():
    return [json.loads(line) for line in Path(__file__).with_name("own.jsonl").open()]
'''


# ------------------------------------------------------------ files


def mixture(folder: Path) -> Tree:
    """Two files, of which one is drawn from three times as often."""
    files = [
        {"path": write_jsonl(folder / name, problems(first)), "weight": weight}
        for name, first, weight in (("often.jsonl", 0, 3), ("seldom.jsonl", ROWS, 1))
    ]
    return small({"train": files})


def formats(folder: Path) -> Tree:
    """JSONL, parquet, a directory as `datasets` saves them, and a function, equally often."""
    write_jsonl(folder / "own.jsonl", problems(0))
    (folder / "brought.py").write_text(SOURCE, encoding="utf-8")
    table = pyarrow.Table.from_pylist(problems(ROWS))
    parquet.write_table(table, folder / "table.parquet")
    saved = folder / "saved"
    saved.mkdir()
    table = pyarrow.Table.from_pylist(problems(2 * ROWS))
    with pyarrow.ipc.new_stream(saved / "data.arrow", table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (saved / "state.json").write_text(json.dumps(state), encoding="utf-8")
    lines = write_jsonl(folder / "lines.jsonl", problems(3 * ROWS))
    paths = [lines, str(folder / "table.parquet"), str(saved), "brought:rows"]
    return small({"train": [{"path": path, "weight": 1} for path in paths]})


def show_files(ran: Ran) -> Tree:
    """Return how often each file was drawn from, against its weight."""
    tree = yaml.safe_load((ran.folder / "config.yaml").read_text(encoding="utf-8"))
    weights = {Path(file["path"]).name: file["weight"] for file in tree["data"]["train"]}
    drawn = {Path(path).name: ROWS * n for path, n in ran.summary["data_epochs"].items()}
    total = sum(drawn.values())
    shares = {name: round(count / total, 3) for name, count in drawn.items()}
    expected = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    # four standard deviations of a share of so many independent draws
    slack = {name: 4 * (p * (1 - p) / total) ** 0.5 for name, p in expected.items()}
    return {
        "prompts_drawn": {name: round(count) for name, count in drawn.items()},
        "share": shares,
        "share_by_weight": {name: round(p, 3) for name, p in expected.items()},
        "as_asked": all(abs(shares[name] - p) <= slack[name] for name, p in expected.items()),
    }


def epochs(folder: Path) -> Tree:
    """A file that is read twice, and ends the run."""
    train = write_jsonl(folder / "train.jsonl", problems(0))
    return small({"train": train, "epochs": 2}, run={"max_steps": 100, "seed": 7})


def show_epochs(ran: Ran) -> Tree:
    """Return how often each row was trained on."""
    times = Counter(row["prompt"] for row in ran.rollouts if row["drop_reason"] is None)
    updates = ran.summary["updates"]
    return {
        **{"rows": len(times), "updates": updates, "max_steps": 100},
        "times_trained_on": {str(n): count for n, count in sorted(Counter(times.values()).items())},
        "as_asked": len(times) == ROWS
        and set(times.values()) == {2}
        and updates * BATCH == 2 * ROWS,
    }


# ------------------------------------------------------------ chats


def chat(folder: Path) -> Tree:
    """Messages, with a system prompt and a variable of the template."""
    template = "{% for m in messages %}{{ m['content'] }}{{ mark or '' }}{% endfor %}"
    tree = small(
        {
            "train": write_jsonl(
                folder / "train.jsonl",
                [
                    row | {"prompt": [{"role": "user", "content": row["prompt"]}]}
                    for row in problems(0)
                ],
            ),
            "chat_template": True,
            "system_prompt": SYSTEM,
            "chat_template_kwargs": {"mark": MARK},
        }
    )
    for role in ("student", "teacher"):
        model = folder / role
        shutil.copytree(tree[role]["model"], model)
        (model / "chat_template.jinja").write_text(template, encoding="utf-8")
        tree[role]["model"] = str(model)
    return tree


def show_chat(ran: Ran) -> Tree:
    """Return what the student read."""
    prompts = [row["prompt"] for row in ran.rollouts]
    begun = sum(prompt.startswith(SYSTEM + MARK) for prompt in prompts) / len(prompts)
    marked = sum(prompt.endswith(MARK) for prompt in prompts) / len(prompts)
    return {
        "a_prompt": prompts[0],
        "share_with_the_system_prompt": begun,
        "share_with_the_variable": marked,
        "as_asked": begun == marked == 1,
    }


# ------------------------------------------------------------ what a row says


def teachers(folder: Path) -> Tree:
    """Subtractions are scored by a teacher of their own."""
    rows = [
        row | {"who": "subtraction" if "-" in row["prompt"] else "teacher"} for row in problems(0)
    ]
    train = write_jsonl(folder / "train.jsonl", rows)
    tree = small({"train": train, "teacher_key": "who"})
    return tree | {"teachers": {"subtraction": dict(tree["teacher"])}}


def show_teachers(ran: Ran) -> Tree:
    """Return who scored what."""
    scored = Counter((row["teacher"], "-" in row["prompt"]) for row in ran.rollouts)
    return {
        "additions_by_teacher": scored["teacher", False],
        "subtractions_by_subtraction": scored["subtraction", True],
        "others": scored.total() - scored["teacher", False] - scored["subtraction", True],
        "as_asked": set(scored) == {("teacher", False), ("subtraction", True)},
    }


def limits(folder: Path) -> Tree:
    """Every other row has a limit of its own."""
    rows = [
        row | ({"most": SHORTEST} if number % 2 else {}) for number, row in enumerate(problems(0))
    ]
    train = write_jsonl(folder / "train.jsonl", rows)
    return small({"train": train, "max_new_tokens_key": "most"})


def show_limits(ran: Ran) -> Tree:
    """Return the lengths of the responses with and without a limit of their own."""
    limited = {row["prompt"] for row in problems(0)[1::2]}
    tokens: dict[bool, list[int]] = {True: [], False: []}
    for row in ran.rollouts:
        tokens[row["prompt"] in limited].append(len(row["tokens"]))
    own, other = tokens[True], tokens[False]
    return {
        "with_a_limit": {"limit": SHORTEST, "most": max(own), "mean": round(fmean(own), 1)},
        "without": {"limit": LIMIT, "most": max(other), "mean": round(fmean(other), 1)},
        "as_asked": max(own) == SHORTEST < max(other) <= LIMIT,
    }


def stops(folder: Path) -> Tree:
    """Additions end before their result, by a string of their row; subtractions at a borrow."""
    rows = [row | ({"ends": [ENDS]} if "+" in row["prompt"] else {}) for row in problems(0)]
    train = write_jsonl(folder / "train.jsonl", rows)
    return small({"train": train, "stop_key": "ends"}, rollout={"stop": ["b1"]})


def show_stops(ran: Ran) -> Tree:
    """Return what ended the responses."""
    wanted = {"+": ENDS, "-": "b1"}
    found: dict[str, Counter[str]] = {sign: Counter() for sign in wanted}
    misplaced = 0
    for row in ran.rollouts:
        sign = "+" if "+" in row["prompt"] else "-"
        text, reason = response_of(row), row["finish_reason"]
        found[sign][reason] += 1
        ends = [text.find(each) for each in (wanted[sign], "b1") if each in text]
        cut = [at for at in ends if at + 2 < len(text)]
        misplaced += bool(cut) or (reason == "stop_string") != bool(ends)
    share = sum(each["stop_string"] for each in found.values()) / len(ran.rollouts)
    return {
        "share_ended_by_a_string": round(share, 3),
        "additions": dict(found["+"]),
        "subtractions": dict(found["-"]),
        "responses_that_go_on_after_a_string": misplaced,
        "as_asked": misplaced == 0 and found["+"]["stop_string"] > 0 < found["-"]["stop_string"],
    }


DATA = (
    Item("mixture", "two files with the weights 3 and 1", mixture, show_files),
    Item("formats", "JSONL, parquet, a saved data set, a function", formats, show_files),
    Item("epochs", "data.epochs: 2 ends the run", epochs, show_epochs),
    Item("chat", "messages, system prompt, chat_template_kwargs", chat, show_chat),
    Item("teachers", "a teacher by row", teachers, show_teachers),
    Item("limits", "max_new_tokens by row", limits, show_limits),
    Item("stops", "stop strings of the run and of a row", stops, show_stops),
)
