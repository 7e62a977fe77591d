"""A server that SGLang's own command started, with nothing of ours but the unpacked wheel."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sglang_bridge.conformance import refusals, scores
from sglang_bridge.conformance.main import run
from sglang_bridge.conformance.oracle import Oracle
from tests.e2e.conftest import ARITHMETIC
from tests.support.late_proxy import late_proxy
from tests.support.paths import ROOT
from tests.support.stock_server import stock_server
from tests.support.wheels import unpacked_wheel

pytestmark = pytest.mark.e2e

MODEL, KEY = ARITHMETIC / "teacher", "sesame"


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
