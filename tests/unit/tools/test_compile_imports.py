"""Set-up compiles what a run imports, following import statements without executing anything."""

from __future__ import annotations

import sys
from pathlib import Path

from tools import compile_imports
from tools.compile_imports import compile_reachable

FILES = {
    "start": "import a.b\nraise SystemExit('is never executed')",
    "a/__init__": "from . import near",
    "a/b": "from .deep.one import value\nfrom typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    import for_types\nelse:\n    import for_others\n"
    "try:\n    import in_try\nexcept ImportError:\n    import in_except\n"
    "def function():\n    import in_function",
    "a/near": "import broken",
    "a/deep/__init__": "",
    "a/deep/one": "from .. import sibling\nfrom ..sub import *",
    "a/sibling": "",
    "a/sub/__init__": "from .module import thing",
    "a/sub/module": "",
    "broken": "import sibling_of_broken +",
    "for_types": "",
    "for_others": "",
    "in_try": "",
    "in_except": "",
    "in_function": "",
    "nobody": "",
    "megatron_opd/__init__": "",
    "megatron_opd/program": "def main():\n    from in_function import x\n    return lambda: x",
}


def compiled_after(root: Path, *programs: str) -> set[str]:
    """Names of the modules that have bytecode in `root`, made anew."""
    for name, text in FILES.items():
        file = root / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    count = compile_reachable(programs, (root,))
    tag = f".{sys.implementation.cache_tag}.pyc"
    made = {
        str(file.parent.parent.relative_to(root) / file.name.removesuffix(tag))
        for file in root.rglob(f"*{tag}")
    }
    assert count == len(made)
    return made


def test_what_a_program_imports_is_compiled_and_nothing_else(tmp_path: Path) -> None:
    assert compiled_after(tmp_path, "start") == {
        *("start", "a/__init__", "a/b", "a/near", "a/deep/__init__", "a/deep/one"),
        *("a/sibling", "a/sub/__init__", "a/sub/module"),
        *("for_others", "in_try", "in_except"),
    }


def test_imports_inside_this_projects_own_functions_are_followed(tmp_path: Path) -> None:
    assert compiled_after(tmp_path, "megatron_opd.program") == {
        *("megatron_opd/__init__", "megatron_opd/program", "in_function")
    }


def test_every_program_of_a_run_has_a_source_file() -> None:
    places = compile_imports.roots()
    missing = [n for n in compile_imports.PROGRAMS if compile_imports.find(n, places) is None]
    assert missing == []
