"""Names that Megatron and we take from TransformerEngine are found, and those it lacks are told."""

import ast
from pathlib import Path

import pytest

from checks.gpu.record import PartFailed
from checks.gpu_ready import names

USES = """
import engine as te
import engine.deep
from engine.deep import Thing as T, gone
from other import missing
class A(te.deep.Thing):
    x = te.absent.Name
    y = engine.deep.Thing.method
    z = gone.more
"""


def test_names_are_read_through_every_alias():
    found = names.used(ast.parse(USES), frozenset({"engine"}))
    assert sorted({name for _, name in found}) == [
        "engine",
        "engine.absent",
        "engine.absent.Name",
        "engine.deep",
        "engine.deep.Thing",
        "engine.deep.Thing.method",
        "engine.deep.gone",
        "engine.deep.gone.more",
    ]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in place of TransformerEngine, and sources that use it."""
    (tmp_path / "engine" / "deep").mkdir(parents=True)
    (tmp_path / "engine" / "__init__.py").write_text("")
    (tmp_path / "engine" / "deep" / "__init__.py").write_text("class Thing:\n    method = 1\n")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "user.py").write_text(USES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(names, "PACKAGES", ("engine",))
    monkeypatch.setattr(names, "roots", lambda: [sources])
    return sources


def test_a_name_that_the_engine_has_lost_fails_unless_it_is_allowed(
    engine: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(names, "ALLOWED", {"engine.absent": "not used here"})
    with pytest.raises(PartFailed, match=r"^engine\.deep\.gone is missing, which .*user\.py:4"):
        names.measure()
    allowed = {"engine.absent": "not used here", "engine.deep.gone": "guarded"}
    monkeypatch.setattr(names, "ALLOWED", allowed)
    assert list(names.measure()["missing"]) == list(allowed)
    monkeypatch.setattr(names, "ALLOWED", allowed | {"engine.deep.Thing": "stale"})
    with pytest.raises(PartFailed, match=r"^engine\.deep\.Thing is allowed to be missing and is"):
        names.measure()
