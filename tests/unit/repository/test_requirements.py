"""The locks hold what setup.py asks for, and nothing but versions and hashes."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.packaging_facts import packaging_facts
from tests.support.paths import ROOT
from tools.house import AROUND

LOCKS = {name: ROOT / "requirements" / f"{name}.lock" for name in ("cpu", "gpu")}
EXTRAS = {
    "cpu": ("cpu", "ray", "test", "plots", "wandb", "browser"),
    "gpu": ("gpu", "ray", "test", "wandb"),
}


def asked(extras: tuple[str, ...]) -> list[Requirement]:
    facts = packaging_facts()
    lines = [
        *facts["install_requires"],
        *(line for x in extras for line in facts["extras_require"][x]),
    ]
    return [Requirement(line) for line in lines]


def locked(name: str) -> dict[str, str]:
    """Version by package."""
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", LOCKS[name].read_text(), re.MULTILINE)
    return {canonicalize_name(package): version for package, version in pins}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_a_version_of_everything_that_setup_py_asks_for(name: str):
    versions = locked(name)
    wrong = [
        f"{requirement}, locked {versions.get(canonicalize_name(requirement.name))}"
        for requirement in asked(EXTRAS[name])
        if not requirement.specifier.contains(
            versions.get(canonicalize_name(requirement.name), "0"), prereleases=True
        )
    ]
    assert wrong == []


def test_both_machines_have_the_same_engines_but_for_torch():
    cpu, gpu = locked("cpu"), locked("gpu")
    for package in ("megatron-core", "sglang", "transformers", "tokenizers", "uv"):
        assert cpu[package] == gpu[package]
    assert gpu["torch"] == "2.14.1", "what this SGLang demands"


def test_transformer_engine_is_one_version_for_the_cuda_of_torch():
    parts = {name: v for name, v in locked("gpu").items() if name.startswith("transformer-engine")}
    assert sorted(parts) == [
        "transformer-engine",
        "transformer-engine-cu13",
        "transformer-engine-torch",
    ]
    assert len(set(parts.values())) == 1


def test_every_package_of_the_gpu_lock_has_a_hash():
    text = LOCKS["gpu"].read_text()
    entries = [entry for entry in re.split(r"\n(?=\w)", text) if not entry.startswith("#")]
    assert len(entries) == len(locked("gpu")) > 200
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_index(name: str):
    assert re.findall(r"https?://\S+|file:\S+|--(?:extra-)?index\S*", LOCKS[name].read_text()) == []


def test_the_core_draws_nothing():
    """matplotlib is of tools/plot_*.py, and of --plot of two commands, which import it late."""
    core = {canonicalize_name(r.name) for r in asked(())}
    assert "matplotlib" not in core
    importers = [
        path.relative_to(ROOT).as_posix()
        for top in ("megatron_opd", "sglang_bridge", *AROUND, "tools", "tests")
        for path in sorted((ROOT / top).rglob("*.py"))
        if re.search(r"^\s*(?:import|from) matplotlib", path.read_text(), re.MULTILINE)
    ]
    commands = {"megatron_opd/evaluation/plot.py", "megatron_opd/mismatch/plot.py"}
    assert {path for path in importers if not path.startswith("tools/plot_")} == commands
    for command in sorted(commands):
        late = [line for line in (ROOT / command).read_text().splitlines() if "matplotlib" in line]
        assert all(line.startswith("    ") for line in late)
