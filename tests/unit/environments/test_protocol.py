"""Environments are made by name or import path; importing the package imports no torch."""

import subprocess
import sys

import pytest

from megatron_opd.environments.protocol import BUILT_IN, Environment, make_environment
from tests.support.rogue_environments import RogueEnvironment

ROGUE = "tests.support.rogue_environments"
MODULES = """
import pkgutil, importlib, sys
import megatron_opd.environments as package
for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
heavy = sorted({"torch", "transformers", "sglang", "jsonschema"} & set(sys.modules))
print(len([name for name in sys.modules if name.startswith(package.__name__ + ".")]), *heavy)
"""


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_is_made(name: str):
    assert isinstance(make_environment(name, {}), Environment)


def test_one_of_the_users_is_made_with_its_options():
    made = make_environment(f"{ROGUE}:RogueEnvironment", {"does": "raises"})
    assert isinstance(made, RogueEnvironment)


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        ("chess", {}, "environment.type must be calculator, python, guess or MODULE:CLASS"),
        ("nowhere.at_all:X", {}, "module nowhere.at_all of nowhere.at_all:X cannot be imported"),
        (f"{ROGUE}:Nothing", {}, "has no Nothing"),
        (f"{ROGUE}:UnprintableError", {}, "must have async methods start and step"),
        ("guess", {"hihg": 3}, "environment: .* unexpected keyword argument 'hihg'"),
        ("guess", {"guesses": 0}, "environment: .*guesses >= 1"),
        (f"{ROGUE}:VALUES", {}, "environment: .*not callable"),
    ],
)
def test_what_cannot_be_made_is_told_in_a_line(kind: str, options, error: str):
    with pytest.raises(ValueError, match=error):
        make_environment(kind, options)


def test_importing_the_package_imports_no_torch():
    command = [sys.executable, "-c", MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    number, *heavy = done.stdout.split()
    assert int(number) > 12
    assert heavy == []
