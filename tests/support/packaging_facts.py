"""What setup.py hands to setuptools."""

import runpy
from functools import cache
from typing import Any

import pytest
import setuptools

from tests.support.paths import ROOT


@cache
def packaging_facts() -> dict[str, Any]:
    """Its keyword arguments, by name."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", lambda **facts: found.update(facts))
        runpy.run_path("setup.py")
    return found
