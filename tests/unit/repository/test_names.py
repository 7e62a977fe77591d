"""A public class name means one thing: go-to-definition and a search lead to one place."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.support.paths import ROOT

SOURCES = sorted([*ROOT.glob("megatron_opd/**/*.py"), *ROOT.glob("sglang_bridge/**/*.py")])


def defined_twice(sources: list[Path]) -> dict[str, list[str]]:
    """{name of a public class: the files that define it}, of those with several."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.name)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_public_class_is_defined_twice():
    assert len(SOURCES) > 100
    assert defined_twice(SOURCES) == {}


def test_one_that_is_defined_twice_is_found(tmp_path: Path):
    for name, text in (("a.py", "class Twice: ..."), ("b.py", "if 1:\n    class Twice: ...")):
        (tmp_path / name).write_text(text)
    assert defined_twice(sorted(tmp_path.glob("*.py"))) == {"Twice": ["a.py", "b.py"]}
