"""Writes train.jsonl and heldout.jsonl of this example from the topics in prompts.yaml.

python -m examples.smollm2.make_prompts
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
SEED = 2026
TEMPLATES_OF_A_HELDOUT_TOPIC = 2


def read_topics() -> dict[str, Any]:
    """Read prompts.yaml."""
    return yaml.safe_load((HERE / "prompts.yaml").read_text(encoding="utf-8"))


def train_prompts(source: dict[str, Any]) -> list[str]:
    """Put every training topic into every template of its kind, add the written ones, shuffle."""
    made = [
        template.format(topic)
        for kind in source["kinds"].values()
        for topic in kind["train"]
        for template in kind["templates"]
    ]
    prompts = made + source["written"]["train"]
    random.Random(SEED).shuffle(prompts)
    return prompts


def heldout_prompts(source: dict[str, Any]) -> list[str]:
    """Put every held-out topic into two templates, and mix so that any first part has all kinds."""
    made: list[str] = []
    for kind in source["kinds"].values():
        templates = kind["templates"]
        for index, topic in enumerate(kind["heldout"]):
            for step in range(TEMPLATES_OF_A_HELDOUT_TOPIC):
                made.append(templates[(index + step) % len(templates)].format(topic))
    prompts = made + source["written"]["heldout"]
    random.Random(SEED).shuffle(prompts)
    return prompts


def overlaps(source: dict[str, Any], train: list[str], heldout: list[str]) -> list[str]:
    """Say where training and held-out prompts are not disjoint; empty when they are.

    No prompt may be in both, and no topic of one file may occur within a prompt of the other.
    """
    kinds = source["kinds"].values()
    found = [f"in both: {prompt}" for prompt in sorted(set(train) & set(heldout))]
    for ours, theirs in (("train", heldout), ("heldout", train)):
        for topic in (topic for kind in kinds for topic in kind[ours]):
            found += [
                f"{ours} topic {topic!r} in: {text}" for text in theirs if _holds(text, topic)
            ]
    return found


def _holds(text: str, topic: str) -> bool:
    return f" {topic.casefold()} " in f" {text.casefold().strip('.?')} "


def main() -> None:
    """Write both files beside this program."""
    source = read_topics()
    train, heldout = train_prompts(source), heldout_prompts(source)
    shared = overlaps(source, train, heldout)
    if shared:
        raise SystemExit("\n".join(shared))
    for name, prompts in (("train", train), ("heldout", heldout)):
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (HERE / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}.jsonl: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
