"""docs/packages.md says what the import rules are."""

from tests.support.tools import exit_code
from tools.house import LAYERS
from tools.package_map import page


def test_the_map_of_packages_is_current():
    assert exit_code("package_map", "--check") == 0, "run: python tools/package_map.py"


def test_every_package_is_on_the_map():
    assert all(f"| `{name}` |" in page() for layer in LAYERS for name in layer)
