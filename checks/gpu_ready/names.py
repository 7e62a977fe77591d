"""Every name that Megatron-Core and this project take from TransformerEngine, looked up in it.

Megatron guards most of its imports: a name that a new release has lost turns a fast path off, or
fails when the path is first taken, and an import of the module says nothing.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.gpu.record import PartFailed
from harness.tree import ROOT

PACKAGES = ("transformer_engine", "transformer_engine_torch")
OURS = ("megatron_opd", "sglang_bridge")
_ATTENTION = "transformer_engine.pytorch.attention"
ALLOWED = {
    f"{_ATTENTION}._SplitAlongDim": "guarded: torch.split cuts queries, keys and values instead",
    f"{_ATTENTION}.apply_rotary_pos_emb": "of TransformerEngine before 2.3; now in attention.rope",
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8": "of TransformerEngine before 2.0",
    "transformer_engine.pytorch.module.base.get_workspace": "guarded: its products have their own",
}
"""Names that the locked TransformerEngine lacks, and why that costs nothing here."""


@dataclass(frozen=True)
class Use:
    """A place in a source that takes the dotted `name` from a package."""

    name: str
    place: str


def measure() -> dict[str, Any]:
    """Names that are taken, and those that are missing. Raises PartFailed for one not allowed."""
    places = places_by_name(each for root in roots() for each in uses_below(root, PACKAGES))
    missing: dict[str, list[str]] = {}
    for name in sorted(places):  # what a missing name holds is not told besides
        if not any(name.startswith(f"{other}.") for other in missing) and not exists(name):
            missing[name] = places[name]
    unknown = sorted(set(missing) - set(ALLOWED))
    found = sorted(set(ALLOWED) - set(missing))
    figures = {"names": len(places), "missing": missing, "allowed": ALLOWED}
    if unknown:
        raise PartFailed(f"{unknown[0]} is missing, which {missing[unknown[0]][0]} takes", figures)
    if found:
        raise PartFailed(f"{found[0]} is allowed to be missing and is not", figures)
    return figures


def roots() -> list[Path]:
    """The folders of the installed Megatron-Core and of what is ours."""
    import megatron.core

    return [*map(Path, megatron.core.__path__), *(ROOT / package for package in OURS)]


def uses_below(root: Path, packages: Iterable[str]) -> Iterator[Use]:
    """Every use of a name of these packages in the sources below a folder."""
    for file in sorted(root.rglob("*.py")):
        for line, name in used(ast.parse(file.read_text(encoding="utf-8")), frozenset(packages)):
            yield Use(name, f"{file.relative_to(root.parent)}:{line}")


def places_by_name(uses: Iterable[Use]) -> dict[str, list[str]]:
    """{name: where it is taken}."""
    places: dict[str, list[str]] = {}
    for use in uses:
        places.setdefault(use.name, []).append(use.place)
    return places


def used(tree: ast.AST, packages: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of what a module imports from packages, and reads as an attribute.

    Of what was bound by a `from` import, attributes count where it is a module's name; a read
    through any other variable is not seen.
    """
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in packages:
                    yield node.lineno, alias.name
                    top = alias.name if alias.asname else alias.name.split(".")[0]
                    bound[alias.asname or top] = top
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            words = dotted(node)
            if words and words[0] in bound:
                yield node.lineno, ".".join([bound[words[0]], *words[1:]])


def dotted(node: ast.expr) -> list[str]:
    """["te", "pytorch", "Linear"] of te.pytorch.Linear; empty for anything but names."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return [*before, node.attr]
    return []


def exists(name: str) -> bool:
    """Whether a dotted name can be imported: modules as far as they go, then attributes."""
    words = name.split(".")
    try:
        held: Any = importlib.import_module(words[0])
    except ImportError:
        return False
    for index, word in enumerate(words[1:], 2):
        if not hasattr(held, word):
            try:
                importlib.import_module(".".join(words[:index]))
            except ImportError:
                return False
        held = getattr(held, word)
    return True
