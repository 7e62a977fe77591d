"""docs/configuration.md says what the schema says."""

import subprocess
import sys

from tests.support.paths import ROOT


def test_the_reference_page_is_current():
    done = subprocess.run([sys.executable, ROOT / "tools" / "config_reference.py", "--check"])
    assert done.returncode == 0, "run: python tools/config_reference.py"
