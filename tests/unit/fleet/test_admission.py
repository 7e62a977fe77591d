"""Which key a server is asked with: the run's random one stays with the servers of this machine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opd.checkpoint.claimant import Claimant
from megatron_opd.errors import UserError
from megatron_opd.fleet import admission as admission_module
from megatron_opd.fleet.admission import ServerAdmission
from tests.support.config_files import minimal

OURS, NEW = "http://ours:1", "http://127.0.0.1:1"


@pytest.mark.parametrize("named", [None, "OPD_TEST_KEY"])
def test_a_server_that_joined_is_never_shown_the_random_key(
    named: str | None, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, str | None, bool]] = []

    async def take_in(
        config: Any, role: str, fleet: Any, url: str, key: Any, vocab: int, _: Any, suits: Any
    ) -> Any:
        asked.append((url, key, suits is not None))

    monkeypatch.setattr(admission_module, "take_in", take_in)
    monkeypatch.setenv("OPD_TEST_KEY", "secret")
    config = minimal(student={"model": "s", "api_key_env": named})
    prepared: Any = SimpleNamespace(
        vocab_sizes={"student": 9}, ends={"student": None}, student=SimpleNamespace(spec=None)
    )
    fleets: Any = {"student": None}
    admission = ServerAdmission(config, prepared, fleets, Claimant("run"), {"student": "random"})

    async def scenario() -> None:
        await admission.readmit("student", OURS)
        await admission.admit("student", NEW)
        await admission.readmit("student", NEW)

    asyncio.run(scenario())
    key = None if named is None else "secret"
    assert asked == [(OURS, "random", False), (NEW, key, True), (NEW, key, False)]


def test_a_server_elsewhere_without_a_key_does_not_join(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    async def take_in(config: Any, role: str, fleet: Any, url: str, *rest: Any) -> Any:
        asked.append(url)

    monkeypatch.setattr(admission_module, "take_in", take_in)
    prepared: Any = SimpleNamespace(
        vocab_sizes={"student": 9}, ends={"student": None}, student=SimpleNamespace(spec=None)
    )
    fleets: Any = {"student": None}

    def admission(*, insecure: bool) -> ServerAdmission:
        config = minimal(security={"insecure": insecure})
        return ServerAdmission(config, prepared, fleets, Claimant("run"), {"student": "random"})

    with pytest.raises(UserError, match=r"student\.api_key_env must name .* http://10\.0\.0\.7:1"):
        asyncio.run(admission(insecure=False).admit("student", "http://10.0.0.7:1"))
    assert asked == []
    asyncio.run(admission(insecure=True).admit("student", "http://10.0.0.7:1"))
    assert asked == ["http://10.0.0.7:1"]
