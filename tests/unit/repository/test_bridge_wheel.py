"""The wheel of sglang_bridge alone: what it holds, what it asks for, and what its client needs."""

import configparser
import email
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sglang_bridge.server.compat.hooks import SUPPORTED
from tests.support.packaging_facts import packaging_facts
from tests.support.paths import ROOT
from tests.support.wheels import unpacked_wheel

INFO = "sglang_bridge-0.1.0.dist-info"
BLOCKED = ("torch", "sglang", "megatron", "megatron_opd", "transformers", "psutil", "safetensors")
IMPORT = """
import importlib, sys
for name in {blocked!r}:
    sys.modules[name] = None
for name in {names!r}:
    found = importlib.import_module("sglang_bridge." + name)
    assert found.__file__.startswith({site!r}), found.__file__
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked_wheel(tmp_path_factory.mktemp("wheel"))


def test_it_holds_the_package_and_nothing_else(site: Path):
    source = ROOT / "sglang_bridge"
    kept = [*source.rglob("*.py"), source / "py.typed", source / "server" / "options.txt"]
    expected = {f"sglang_bridge/{path.relative_to(source)}" for path in kept}
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert {path for path in found if not path.startswith(INFO)} == expected
    assert f"{INFO}/licenses/LICENSE" in found


def test_it_asks_for_what_the_project_asks_for(site: Path):
    told = email.message_from_string((site / INFO / "METADATA").read_text())
    facts = packaging_facts()
    asked = [Requirement(line) for line in told.get_all("Requires-Dist", [])]
    ranges = {r.name: r.specifier for r in map(Requirement, facts["install_requires"])}
    client = {r.name: r.specifier for r in asked if r.marker is None}
    assert client == {name: ranges[name] for name in ("aiohttp", "msgspec", "numpy")}
    extra = {r.name: str(r.specifier) for r in asked if r.marker is not None}
    assert extra["sglang"] == f"=={SUPPORTED}"
    assert told["Version"] == facts["version"]


def test_sglang_finds_the_same_plugins_in_both(site: Path):
    parser = configparser.ConfigParser()
    parser.read(site / INFO / "entry_points.txt")
    points = packaging_facts()["entry_points"]
    for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
        assert [f"{name} = {value}" for name, value in parser[group].items()] == points[group]


def imported(site: Path, *names: str) -> subprocess.CompletedProcess[str]:
    script = IMPORT.format(blocked=BLOCKED, names=names, site=str(site))
    return subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(site)},
        cwd=site,
        text=True,
        capture_output=True,
    )


def test_the_client_needs_no_engine(site: Path):
    ended = imported(site, "client", "fleet", "score_json", "conformance.main")
    assert ended.returncode == 0, ended.stderr


def test_what_needs_one_is_told(site: Path):
    ended = imported(site, "weights.flat")
    assert "import of torch halted" in ended.stderr
