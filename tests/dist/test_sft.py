"""Supervised fine-tuning from a fresh initialisation and from a checkpoint."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_opd.config.sft import SftConfig
from megatron_opd.data.answers import Example
from megatron_opd.data.examples import example_rules
from megatron_opd.data.examples import read_examples as read_file
from megatron_opd.data.template import this_moment
from megatron_opd.data.tokenizer import CHAT_TEMPLATE
from megatron_opd.learner.sft import batches
from megatron_opd.models.spec import read_model_spec
from tests.dist import jobs
from tests.dist.worlds import run_world
from tests.support.figures import bounded
from tests.support.models import tiny_qwen3_moe

pytestmark = pytest.mark.dist

PAIRS = [(f"{a}+{b}=", f" {a + b}.") for a in range(8) for b in range(8)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = [json.dumps({"prompt": p, "response": r}) for p, r in PAIRS]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def weightless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with config.json and a tokenizer only."""
    path = tiny_qwen3_moe(tmp_path_factory.mktemp("init") / "moe")
    (path / "model.safetensors").unlink()
    return path


def make_config(
    init: Path, data: Path, output: Path, updates: int, **learner: Any
) -> dict[str, Any]:
    optimizer = {"lr": 3e-3, "warmup_steps": 2, "lr_scheduler": "cosine", "eps": 1e-4}
    return {
        "run": {"max_steps": updates, "seed": 5},
        "init": str(init),
        "output": str(output),
        "train": str(data),
        "batch_size": 15,
        "save_dtype": "float32",
        "learner": {"dtype": "float32", "threads": 1, "optimizer": optimizer, **learner},
    }


def mean_loss(model: Path) -> float:
    """Mean negative log-likelihood of the response tokens, end token included, by transformers."""
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    total = tokens = 0.0
    for prompt, response in PAIRS:
        first = tokenizer.encode(prompt)
        rest = [*tokenizer.encode(response), tokenizer.eos_token_id]
        with torch.no_grad():
            logp = student(torch.tensor([first + rest])).logits[0].log_softmax(-1)
        rows = logp[len(first) - 1 : -1]
        total -= float(rows.gather(1, torch.tensor(rest)[:, None]).sum())
        tokens += len(rest)
    return total / tokens


def test_it_learns_alike_in_every_layout(weightless, data, tmp_path):
    """A fresh initialisation depends on the seed alone, so the trained weights agree too.

    Two data-parallel ranks share 15 pairs, each alone: one runs a filler.
    """
    outputs = {}
    for name, size, parallel, budget in (
        ("one", 1, {}, 8192),
        ("tp2", 2, {"tp": 2}, 8192),
        ("ep2", 2, {"dp": 2, "ep": 2}, 1),
    ):
        outputs[name] = tmp_path / name / "model"
        learner = {"parallel": parallel, "max_tokens_per_microbatch": budget}
        config = make_config(weightless, data, outputs[name], 12, **learner)
        run_world(jobs.sft, size, tmp_path / name, config=config)
    loaded = {name: load_file(path / "model.safetensors") for name, path in outputs.items()}
    for name in ("tp2", "ep2"):
        for key, tensor in loaded["one"].items():
            torch.testing.assert_close(loaded[name][key], tensor, rtol=1e-3, atol=1e-4)
    assert mean_loss(outputs["one"]) < 0.75 * math.log(512)
    # It goes on from weights: the first of more updates starts where the last ended.
    again = tmp_path / "again" / "model"
    config = make_config(outputs["one"], data, again, 12)
    run_world(jobs.sft, 1, tmp_path / "again", config=config)
    assert mean_loss(again) < mean_loss(outputs["one"])


@pytest.mark.parametrize(
    ("size", "parallel"),
    [(1, {}), (2, {"tp": 2}), (2, {"cp": 2}), (3, {"dp": 3}), (4, {"pp": 2, "dp": 2})],
)
def test_validation_loss_is_transformers_in_every_layout(size, parallel, started, data, tmp_path):
    """Before the first update and after the last; nothing is learnt from it."""
    metrics = tmp_path / "sft" / "metrics.jsonl"
    config = make_config(started, data, tmp_path / "model", 2, parallel=parallel)
    config |= {"validation": str(data), "metrics": str(metrics), "validate_every": 1}
    run_world(jobs.sft, size, tmp_path / "world", config=config)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["update"] for row in rows] == [0, 1, 2]
    assert rows[0]["loss"] is None
    for row, model in ((rows[0], started), (rows[2], tmp_path / "model")):
        gap = abs(row["validation_loss"] / mean_loss(model) - 1)
        bounded("sft: validation loss against transformers (relative)", gap, 1e-5, parallel)
    assert rows[2]["validation_loss"] < rows[0]["validation_loss"]


@pytest.mark.parametrize(("size", "parallel"), [(1, {}), (2, {"cp": 2})])
def test_the_answers_of_a_chat_are_learnt_in_one_pass(size, parallel, started, tmp_path):
    """The loss is transformers' on the tokens of both answers, of which none is of a question."""
    data, metrics = tmp_path / "chats.jsonl", tmp_path / "metrics.jsonl"
    said = [[*PAIRS[n], *PAIRS[-n]] for n in range(8)]
    roles = ("user", "assistant", "user", "assistant")
    chats = [[{"role": r, "content": c} for r, c in zip(roles, each, strict=True)] for each in said]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    config = make_config(started, data, tmp_path / "model", 2, parallel=parallel)
    template = tmp_path / "own.jinja"
    template.write_text(CHAT_TEMPLATE)
    config |= {"messages_key": "messages", "chat_template": str(template), "batch_size": 8}
    config |= {"validation": str(data), "metrics": str(metrics)}
    run_world(jobs.sft, size, tmp_path / "world", config=config)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    expected, tokens = chat_loss(started, said)
    assert rows[1]["response_tokens"] == tokens
    for found in (rows[0]["validation_loss"], rows[1]["loss"]):
        gap = abs(found / expected - 1)
        bounded("sft: loss of chats against transformers (relative)", gap, 1e-5, parallel)


def chat_loss(model: Path, said: list[list[str]]) -> tuple[float, int]:
    """Mean negative log-likelihood of the answers' tokens, their end tokens too; their number."""
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    total, tokens = 0.0, 0
    for each in said:
        ids, learnt = list[int](), list[int]()
        for n, text in enumerate(each):
            piece = tokenizer.encode(text) + [tokenizer.eos_token_id] * (n % 2)
            learnt += range(len(ids), len(ids) + len(piece)) if n % 2 else ()
            ids += piece
        with torch.no_grad():
            logp = student(torch.tensor([ids])).logits[0].log_softmax(-1)
        total -= sum(float(logp[at - 1, ids[at]]) for at in learnt)
        tokens += len(learnt)
    return total / tokens, tokens


@pytest.fixture(scope="module")
def started(weightless, data, tmp_path_factory):
    """A student after a few updates."""
    base = tmp_path_factory.mktemp("started")
    run_world(jobs.sft, 1, base, config=make_config(weightless, data, base / "model", 4))
    return base / "model"


def read_examples(config: SftConfig, path: Path, max_tokens: int) -> list[Example]:
    """The examples of a file, as the learner reads them."""
    tokenizer = AutoTokenizer.from_pretrained(config.init)
    rules = example_rules(config, tokenizer, read_model_spec(config.init), this_moment())
    return read_file(path, tokenizer, replace(rules, max_tokens=max_tokens)).examples


def test_pairs_and_their_mistakes(weightless, data, tmp_path):
    config = SftConfig.model_validate(make_config(weightless, data, tmp_path, 2))
    pairs = read_examples(config, config.train, 2048)
    assert len(pairs) == len(PAIRS)
    assert pairs[0].ids_S[-1] == 1
    assert pairs[0].position_T.tolist() == list(range(len("0+0="), pairs[0].num_tokens))
    with pytest.raises(ValueError, match=r":1: prompt and response must fit .* 5 tokens, got 8"):
        read_examples(config, config.train, 5)


def test_batches_cover_every_epoch(weightless, data, tmp_path):
    config = SftConfig.model_validate(make_config(weightless, data, tmp_path, 2))
    pairs = read_examples(config, config.train, 2048)
    source = batches(pairs, 24, seed=1)
    epochs = [pair for _ in range(8) for pair in next(source)]
    for start in range(0, len(epochs), len(pairs)):
        assert {id(pair) for pair in epochs[start : start + len(pairs)]} == {id(p) for p in pairs}
    again = batches(pairs, 24, seed=1)
    assert [id(p) for p in next(again)] == [id(p) for p in epochs[:24]]
