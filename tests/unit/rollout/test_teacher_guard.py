"""A teacher that answers nonsense is told before a run; a sound one, or the student itself, is not.

The fake server is an exact model of a Markov chain: what it samples, and what it scores, come from
one table, and each kind of nonsense spoils the scores alone, or the table itself.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_opd.config.schema import Config
from megatron_opd.data.end_tokens import Ending
from megatron_opd.errors import UserError
from megatron_opd.inputs import teachers as teacher_guard
from megatron_opd.inputs.prepare import probes_of
from megatron_opd.inputs.second_pass import SecondPass
from megatron_opd.inputs.teachers import check_teachers, make_teacher_watch
from megatron_opd.rollout.teacher_guard import BOUNDS_NATS, PASSAGE_PROMPT, TeacherProbe, probe
from sglang_bridge.errors import BadReply, ServerUnreachable
from sglang_bridge.protocol import DrawCache, RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from sglang_bridge.retry import Backoff
from tests.support.cli_cases import small_config
from tests.support.fakes import make_prompt

V = 64
PROMPTS = tuple(make_prompt(uid, 2 + uid % 3) for uid in range(8))
Rows = np.ndarray


def table(seed: int, std: float) -> Rows:
    """float32 [V, V]: log-probs of the next id after each id."""
    logits = np.random.default_rng(seed).normal(0, std, (V, V))
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def honest(logp: Rows, request: ScoreRequest) -> Rows:
    """log q of the request's ids, one after another."""
    inputs = np.asarray(request.input_ids)[request.position_T]
    return logp[np.repeat(inputs, np.diff(request.offsets_T1)), request.ids_N]


def shifted(logp: Rows, request: ScoreRequest) -> Rows:
    inputs = np.asarray(request.input_ids)[request.position_T + 1]
    return logp[np.repeat(inputs, np.diff(request.offsets_T1)), request.ids_N]


def values_shifted(logp: Rows, request: ScoreRequest) -> Rows:
    """Every row has the numbers of the next one."""
    rows = np.split(honest(logp, request), request.offsets_T1[1:-1])
    return np.concatenate(
        [np.resize(rows[(t + 1) % len(rows)], len(r)) for t, r in enumerate(rows)]
    )


def permuted(logp: Rows, request: ScoreRequest) -> Rows:
    return honest(logp[:, np.random.default_rng(5).permutation(V)], request)


def of_another_prompt(logp: Rows, request: ScoreRequest) -> Rows:
    return honest(np.roll(logp, 7, axis=0), request)


def uniform(logp: Rows, request: ScoreRequest) -> Rows:
    return np.full(len(request.ids_N), -np.log(V), np.float32)


def constant(logp: Rows, request: ScoreRequest) -> Rows:
    return np.full(len(request.ids_N), -1.5, np.float32)


def not_numbers(logp: Rows, request: ScoreRequest) -> Rows:
    return np.full(len(request.ids_N), np.nan, np.float32)


class Server:
    """Samples from a table, and scores with it as `score_with` says."""

    def __init__(self, logp: Rows, score_with: Callable[..., Rows] = honest, draws: bool = True):
        self.logp, self.score_with, self.draws = logp, score_with, draws
        self.url = "http://127.0.0.1:1"
        self.rng = np.random.default_rng(3)

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        ids, rows, state = [], [], int(request.input_ids[-1])
        for _ in range(request.max_new_tokens):
            token = int(self.rng.choice(V, p=self.probs(state)))
            rows.append(np.union1d(np.argsort(self.logp[state])[-request.num_atoms :], [token]))
            ids.append(token)
            state = token
        before = [int(request.input_ids[-1]), *ids[:-1]]
        offsets_T1 = np.cumsum([0, *map(len, rows)])
        ids_N = np.concatenate(rows).astype(np.int32)
        logp_N = np.concatenate([self.logp[s, r] for s, r in zip(before, rows, strict=True)])
        path = [
            np.searchsorted(row, i) + o
            for row, i, o in zip(rows, ids, offsets_T1[:-1], strict=True)
        ]
        cache = DrawCache(
            offsets_T1=offsets_T1,
            ids_N=ids_N,
            path_T=np.array(path),
            weight_N=np.ones(len(ids_N), np.float32),
            sampler_logp_N=logp_N,
        )
        found = cache if self.draws else None
        return RolloutReply(np.array(ids, np.int32), "length", found, ((0, 0, len(ids)),), self.url)

    def probs(self, state: int) -> Rows:
        probs = np.exp(self.logp[state].astype(np.float64))
        return probs / probs.sum()

    async def score(self, request: ScoreRequest) -> ScoreReply:
        return ScoreReply(self.score_with(self.logp, request))


def probed(server: Server, **changes: Any) -> TeacherProbe:
    settings = {"temperature": 1.0, "max_new_tokens": 16, "vocab_size": V, "name": "t"}
    settings |= {"backoff": Backoff(attempts=1)} | changes
    return asyncio.run(probe(server, PROMPTS, **settings))


@pytest.mark.parametrize("std", [0.6, 2.0, 6.0], ids=["nearly random", "ordinary", "sure"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_teacher_passes(std: float, dtype: str):
    found = probed(Server(table(1, std)))
    assert found.problem(dtype, V) is None
    assert found.gap_nats == found.worst_nats == 0
    assert found.shape.rows == len(PROMPTS) * 16


def test_a_teacher_that_is_sure_of_every_token_passes():
    logp = np.full((V, V), -40.0, np.float32)
    logp[:, 3] = 0
    found = probed(Server(logp))
    assert found.shape.std == 0
    assert found.problem("float32", V) is None


NONSENSE = [shifted, values_shifted, permuted, of_another_prompt, uniform, constant]


@pytest.mark.parametrize("spoil", NONSENSE)
@pytest.mark.parametrize("std", [2.0, 20.0], ids=["ordinary", "sure"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_that_are_not_those_of_its_samples(
    spoil: Callable[..., Rows], std: float, dtype: str
):
    problem = probed(Server(table(1, std), spoil)).problem(dtype, V)
    assert problem is not None
    assert f"{dtype} allows {BOUNDS_NATS[dtype]:g}" in problem


def test_scores_that_are_no_numbers_are_never_sound():
    assert probed(Server(table(1, 2.0), not_numbers)).problem("bfloat16", V) is not None


def test_rounding_and_a_few_flipped_experts_are_no_nonsense():
    def rounded(logp: Rows, request: ScoreRequest) -> Rows:
        scores = honest(logp, request)
        rng = np.random.default_rng(9)
        flips = rng.random(len(scores)) < 0.05
        return scores + rng.normal(0, 0.03, len(scores)) + 0.5 * flips

    found = probed(Server(table(1, 2.0), rounded))
    assert found.worst_nats > BOUNDS_NATS["bfloat16"] > found.gap_nats
    assert found.problem("bfloat16", V) is None
    assert found.problem("float32", V) is not None


def test_a_small_temperature_allows_more_rounding():
    def rounded(logp: Rows, request: ScoreRequest) -> Rows:
        return honest(logp, request) + 2e-3

    server = Server(table(1, 2.0), rounded)
    assert probed(server).problem("float32", V) is not None
    assert probed(server, temperature=4.0).problem("float32", V) is not None
    assert probed(server, temperature=0.25).problem("float32", V) is None


@pytest.mark.parametrize(
    ("std", "words"), [(0.0, "as of a uniform distribution"), (0.01, "-ln 64 = -4.159")]
)
def test_a_model_that_is_itself_uniform(std: float, words: str):
    """It agrees with itself: only the shape of its scores tells."""
    found = probed(Server(table(1, std)))
    assert found.gap_nats == 0
    assert words in str(found.problem("float32", V))


def test_one_number_for_everything():
    """Sampling that fills in the same number as scoring agrees with it."""
    logp = np.full((V, V), -1.5, np.float32)
    server = Server(logp)
    server.probs = lambda state: np.full(V, 1 / V)
    assert "all 128 scores are -1.500 nats" in str(probed(server).problem("float32", V))


def test_a_reply_without_draws_is_a_bad_reply():
    with pytest.raises(BadReply, match="without draws"):
        probed(Server(table(1, 2.0), draws=False))


# ------------------------------------------------------------ what becomes of it


def checked(
    tmp_path: Path,
    models: Path,
    scoring: dict[str, Any],
    *servers: Server,
    second: bool = False,
    **more: Any,
) -> list[str]:
    config = Config.model_validate(small_config(tmp_path, models) | {"scoring": scoring} | more)
    prepared: Any = SimpleNamespace(
        ending=Ending((1,)),
        vocab_sizes={"student": V, "teacher": V},
        probes={"teacher": PROMPTS},
        other=None,
    )
    return asyncio.run(check_teachers(config, prepared, {"teacher": servers}, second=second))


def test_refuse_warn_off(tmp_path: Path, models: Path):
    nonsense = Server(table(1, 2.0), uniform)
    with pytest.raises(UserError) as refusal:
        checked(tmp_path, models, {}, nonsense)
    for word in ("teacher at http://127.0.0.1:1", "nonsense", "scoring.guard", "teacher.model"):
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)
    (line,) = checked(tmp_path, models, {"guard": "warn"}, nonsense)
    assert line.startswith("warning: teacher at http://127.0.0.1:1 answers nonsense")
    assert checked(tmp_path, models, {"guard": "off"}, nonsense) == []
    (line,) = checked(tmp_path, models, {}, Server(table(1, 2.0)))
    assert line.startswith("teacher: scores agree with sampling to 0.0e+00 nats (median of ")


def test_one_bad_server_of_several_is_named(tmp_path: Path, models: Path):
    good, bad = Server(table(1, 2.0)), Server(table(1, 2.0), shifted)
    bad.url = "http://127.0.0.1:2"
    lines = checked(tmp_path, models, {"guard": "warn"}, good, bad)
    assert [line.split(":")[0] for line in lines] == ["warning", "teacher"]
    assert "teacher at http://127.0.0.1:2 answers nonsense" in lines[0]
    with pytest.raises(UserError, match=bad.url):
        checked(tmp_path, models, {}, good, bad)


class Flaky(Server):
    """Fails the first `failures` tries of every request."""

    def __init__(self, failures: int):
        super().__init__(table(1, 2.0))
        self.failures, self.tries = failures, Counter[str]()
        self.rids: list[str] = []

    def fail(self, request: RolloutRequest | ScoreRequest, verb: str) -> None:
        prompt = request.rid.split("-")[2]
        self.tries[f"{verb} {prompt}"] += 1
        self.rids.append(request.rid)
        if self.tries[f"{verb} {prompt}"] <= self.failures:
            raise ServerUnreachable(self.url, verb, "reset", sent=True)

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        self.fail(request, "generate")
        return await super().generate(request)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        self.fail(request, "score")
        return await super().score(request)


def test_a_probe_is_tried_as_often_as_a_score(tmp_path: Path, models: Path):
    """Before: one lost connection ended the run, whatever scoring.attempts said."""
    flaky = Flaky(failures=2)
    (line,) = checked(tmp_path, models, {"attempts": 3}, flaky)
    assert line.startswith("teacher: scores agree")
    assert len(flaky.tries) == 2 * len(PROMPTS)
    assert set(flaky.tries.values()) == {3}
    sampled = [rid for rid in flaky.rids if not rid.endswith("-score")]
    assert len(sampled) == len(set(sampled)), "a repeat would meet its own name on the server"
    with pytest.raises(ServerUnreachable, match="reset"):
        checked(tmp_path, models, {"attempts": 2}, Flaky(failures=2))


def test_without_a_teacher_the_guard_rests(tmp_path: Path, models: Path):
    rewards = {
        "objective": {"type": "grpo"},
        "rollout": {"group_size": 4, "max_new_tokens": 8},
        "teacher": None,
    }
    assert checked(tmp_path, models, {}, Server(table(1, 0.0)), **rewards) == []
    config = Config.model_validate(small_config(tmp_path, models) | rewards)
    assert make_teacher_watch(config, {"student": V}) is None


def test_probes_are_a_teachers_own_prompts_and_as_many_as_wanted():
    prompts = [make_prompt(uid) for uid in range(3)]
    assert [prompt.uid for prompt in probes_of(prompts, "teacher")] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert probes_of(prompts, "nobody") == probes_of(prompts, "teacher")


# ------------------------------------------------------------ another program's forward pass


def second_pass_with(monkeypatch: pytest.MonkeyPatch, logp: Rows, dtype: str) -> None:
    """A program whose model is a table; it is asked for short passages."""

    async def pass_of(_: Any, passages: Sequence[ScoreRequest]) -> SecondPass:
        assert 1 <= len(passages) <= 2
        assert all(each.runs[0][0] <= PASSAGE_PROMPT for each in passages)
        scores = tuple(honest(logp, each) for each in passages)
        return SecondPass("transformers", dtype=dtype, logp=scores)

    monkeypatch.setattr(teacher_guard, "second_pass", pass_of)


def test_a_server_of_other_weights_agrees_with_itself_alone(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    """As one that was started with memory in the place of a tensor."""
    second_pass_with(monkeypatch, table(1, 2.0), "float32")
    sound, other = Server(table(1, 2.0)), Server(table(2, 2.0))
    other.url = "http://127.0.0.1:2"
    first, agrees = checked(tmp_path, models, {}, sound, second=True)
    assert first.startswith("teacher: scores agree with sampling")
    assert agrees == "teacher: scores agree with transformers to 0.0e+00 nats (median)"
    assert len(checked(tmp_path, models, {}, other)) == 1, "the first comparison does not see it"
    with pytest.raises(UserError, match=other.url) as refusal:
        checked(tmp_path, models, {}, sound, other, second=True)
    for word in ("differ from those of transformers", "teacher.model", "scoring.guard"):
        assert word in str(refusal.value)
    warned = checked(tmp_path, models, {"guard": "warn"}, sound, other, second=True)
    assert warned[1].startswith(f"warning: teacher at {other.url} answers nonsense")
    assert checked(tmp_path, models, {"guard": "off"}, sound, other, second=True) == []


@pytest.mark.parametrize(
    ("dtype", "teacher", "allowed"),
    [
        ("float32", {}, False),
        ("bfloat16", {}, True),
        ("float32", {"extra_args": ["--quantization", "fp8"]}, True),
        ("float32", {"extra_args": ["--kv-cache-dtype", "fp8_e4m3"]}, True),
        ("float32", {"dtype": "bfloat16"}, True),
    ],
)
def test_what_rounds_more_may_differ_more(
    dtype: str,
    teacher: dict[str, Any],
    allowed: bool,
    tmp_path: Path,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    def rounded(logp: Rows, request: ScoreRequest) -> Rows:
        return honest(logp, request) + 0.05

    second_pass_with(monkeypatch, table(1, 2.0), dtype)
    server = Server(table(1, 2.0), rounded)
    section = small_config(tmp_path, models)["teacher"] | {"dtype": "float32"} | teacher
    warn = {"guard": "warn"}
    lines = checked(tmp_path, models, warn, server, second=True, teacher=section)
    assert lines[-1].startswith("warning:") != allowed


def test_a_quantised_checkpoint_may_differ_as_much(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    second_pass_with(monkeypatch, table(1, 2.0), "float32")
    section = small_config(tmp_path, models)["teacher"] | {"dtype": "float32"}
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    described = json.loads((Path(section["model"]) / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "fp8"}
    (quantised / "config.json").write_text(json.dumps(described))
    section["model"] = str(quantised)
    server = Server(table(1, 2.0), lambda logp, request: honest(logp, request) + 0.05)
    found = checked(tmp_path, models, {"guard": "warn"}, server, second=True, teacher=section)
    assert found[-1].startswith("teacher: scores agree with transformers")


def test_a_pass_of_no_numbers_agrees_with_nothing(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    second_pass_with(monkeypatch, np.full_like(table(1, 2.0), np.nan), "float32")
    with pytest.raises(UserError, match=r"differ from those of transformers .* by nan nats"):
        checked(tmp_path, models, {}, Server(table(1, 2.0)), second=True)


def test_a_pass_that_there_is_not_is_said(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    async def none(*_: Any) -> SecondPass:
        return SecondPass(None, "too large")

    monkeypatch.setattr(teacher_guard, "second_pass", none)
    lines = checked(tmp_path, models, {}, Server(table(2, 2.0)), second=True)
    assert lines[1] == "teacher: scores compared with no other forward pass: too large"
