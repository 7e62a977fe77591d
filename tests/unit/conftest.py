"""Checkpoints that tests read, what tests of `opd` start from, and what every test must end."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import garbage

from sglang_bridge.server.spec import ENABLED_VARIABLE
from tests.support.cli_cases import small_config, tiny_models
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

os.environ[ENABLED_VARIABLE] = "1"  # SGLang is here what a server's processes make of it


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints `teacher` and `student`; who changes one changes a copy."""
    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(tmp_path: Path, models: Path) -> dict[str, Any]:
    """A configuration that every check accepts."""
    return small_config(tmp_path, models)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without experts; who changes it changes a copy."""
    return tiny_qwen3(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose second layer has experts; who changes it changes a copy."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("moe") / "model", mlp_only_layers=[0])


@pytest.fixture(autouse=True)
def contexts_are_ended(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A test ends the ZeroMQ contexts that it makes, unless others go on with them.

    One that is left is collected during another test, and its end waits there for its sockets,
    which nobody closes any more.
    """
    if request.node.get_closest_marker("keeps_contexts"):
        yield
        return
    made, begin = list["weakref.ref[Any]"](), zmq.Context.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(zmq.Context, "__init__", noted)
    yield
    there = [context for each in made if (context := each()) is not None]
    left = [each for each in there if not each.closed and each is not garbage.gc._context]
    for context in left:
        context.destroy(linger=0)
    assert not left, "ZeroMQ contexts are left"
