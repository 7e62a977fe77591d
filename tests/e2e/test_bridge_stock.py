"""A server that SGLang's own command started, with nothing of ours but the unpacked wheel.

It is asked through SGLang's own routes too, as a server of somebody else is: on a CPU like this one
SGLang does not start without the kernels that the plugin brings.
"""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_opd.records.types import Prompt
from megatron_opd.rollout.teacher_guard import probe
from megatron_opd.teacher_apis.foreign import ForeignClient
from megatron_opd.teacher_apis.openai import OpenaiClient
from megatron_opd.teacher_apis.sglang import SglangClient
from sglang_bridge.client import ServerClient
from sglang_bridge.conformance import refusals, scores
from sglang_bridge.conformance.main import run
from sglang_bridge.conformance.oracle import Oracle
from sglang_bridge.errors import BadReply
from sglang_bridge.protocol import ScoreReply, ScoreRequest
from sglang_bridge.retry import Backoff
from tests.e2e.conftest import ARITHMETIC
from tests.support.late_proxy import late_proxy
from tests.support.paths import ROOT
from tests.support.stock_server import stock_server
from tests.support.wheels import unpacked_wheel

pytestmark = pytest.mark.e2e

MODEL, KEY = ARITHMETIC / "teacher", "sesame"
RUNS, TOLERANCE = ((4, 10), (15, 30)), 1e-5


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    scratch = tmp_path_factory.mktemp("stock")
    with stock_server(unpacked_wheel(scratch), MODEL, KEY, scratch) as url:
        yield url


def test_it_passes_every_check(stock: str):
    checks = [*scores.CHECKS, *refusals.CHECKS, Oracle(MODEL).equals_the_model]
    found = asyncio.run(run(stock, KEY, checks))
    assert [each for each in found if not each.holds] == []


def test_one_position_late_is_found(stock: str):
    async def through_the_proxy() -> list[str]:
        async with late_proxy(stock) as url:
            found = await run(url, KEY, [scores.sums_to_one, scores.ignores_itself])
            found += await run(url, KEY, [Oracle(MODEL).equals_the_model])
        return [each.check for each in found if not each.holds]

    assert asyncio.run(through_the_proxy()) == ["ignores itself", "equals the model"]


def test_the_ten_lines(stock: str):
    command = [sys.executable, str(ROOT / "examples" / "scorer" / "score.py"), stock, KEY]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows_TV = Oracle(MODEL).rows([9, 4, 12, 7, 5, 8, 6])[3:]
    assert len(said) == 3
    for line, row_V in zip(said, rows_TV, strict=True):
        ids, logp, drawn = (
            [float(number) for number in part.split(",")]
            for part in re.findall(r"\[([^]]*)\]", line)
        )
        assert logp == pytest.approx(row_V[[int(each) for each in ids]], abs=1e-4)
        assert len(drawn) >= 1


def request(atoms: int) -> ScoreRequest:
    ids = np.random.default_rng(0).integers(3, 40, size=30).astype(np.int32)
    path = np.concatenate([ids[start:stop] for start, stop in RUNS])
    return ScoreRequest(
        rid="r",
        input_ids=ids,
        runs=RUNS,
        offsets_T1=np.arange(len(path) + 1),
        ids_N=path,
        num_atoms=atoms,
        exact=True,
    )


def scored(url: str, kind: type[ServerClient], atoms: int) -> ScoreReply:
    async def run() -> ScoreReply:
        async with kind(url, timeout_s=60, api_key=KEY) as client:
            return await client.score(request(atoms))

    return asyncio.run(run())


@pytest.mark.parametrize("kind", [SglangClient, OpenaiClient])
def test_sampled_ids_have_the_bridges_scores(stock: str, kind: type[ServerClient]):
    theirs, ours = scored(stock, kind, 0), scored(stock, ServerClient, 0)
    np.testing.assert_allclose(theirs.logp_N, ours.logp_N, atol=TOLERANCE)


def test_the_likeliest_ids_are_the_bridges(stock: str):
    theirs = scored(stock, SglangClient, 5).selection
    ours = scored(stock, ServerClient, 5).selection
    assert theirs is not None
    assert ours is not None
    for name in ("offsets_T1", "ids_N", "given_N"):
        np.testing.assert_array_equal(getattr(theirs, name), getattr(ours, name))
    np.testing.assert_allclose(theirs.logp_N, ours.logp_N, atol=TOLERANCE)
    np.testing.assert_allclose(theirs.weight_N, ours.weight_N, atol=TOLERANCE)
    with pytest.raises(BadReply, match=r"set support.type: path, or teacher.api: sglang"):
        scored(stock, OpenaiClient, 5)


@pytest.mark.parametrize("kind", [SglangClient, OpenaiClient])
def test_the_guard_finds_its_scores_sound(stock: str, kind: type[ForeignClient]):
    prompts = [Prompt(0, "", np.array([9, 4, 12], np.int32))] * 2

    async def run() -> str | None:
        async with kind(stock, timeout_s=60, api_key=KEY) as client:
            info = await client.info()
            assert info.model_path == str(MODEL)
            found = await probe(
                client,
                prompts,
                temperature=1.0,
                max_new_tokens=8,
                vocab_size=40,
                name="guard",
                backoff=Backoff(1),
            )
            assert found.gap_nats <= TOLERANCE
            return found.problem("float32", 40)

    assert asyncio.run(run()) is None
