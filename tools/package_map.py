"""Write docs/packages.md: every package of megatron_opd, its layer, and what it may import.

    python tools/package_map.py [--check]

Layers are those of tools/house.py; what a package is for, its own docstring says.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.generated_page import write_or_check  # noqa: E402
from tools.house import LAYERS, ONLY, TORCH_FREE  # noqa: E402

PAGE = ROOT / "docs/packages.md"
HEAD = """<!-- made by tools/package_map.py from tools/house.py -->

# Packages

A package imports from the layers above it, and from its own layer where that makes no circle. Some
are kept to fewer. `PACKAGE/__main__.py` begins a process of its own: it may build all that it
needs, and nobody imports it. `sglang_bridge` stands beside all of them: the client that every
package may use, and in `server/` the plugin that runs inside SGLang. It imports nothing of
`megatron_opd`.
`tests/unit/repository/test_import_rules.py` fails where an import breaks this.

| layer | package | job | files | torch | at most |
|---|---|---|---|---|---|
"""


def job_of(name: str) -> str:
    """The first line of a package's or module's docstring."""
    package = ROOT / "megatron_opd" / name
    file = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0]


def files_of(name: str) -> int:
    """How many Python files a package has."""
    return len(list((ROOT / "megatron_opd" / name).rglob("*.py"))) or 1


def page() -> str:
    """The page."""
    rows = [
        f"| {number} | `{name}` | {job_of(name)} | {files_of(name)} "
        f"| {'no' if name in TORCH_FREE else ''} | {', '.join(sorted(ONLY.get(name, ())))} |"
        for number, layer in enumerate(LAYERS, 1)
        for name in sorted(layer)
    ]
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    """Write or check the page."""
    return write_or_check(PAGE, page(), sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
