"""The direction of imports, read from the syntax trees so that lazy imports count too."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("megatron_opd", "sglang_bridge", "benchmarks", "tools", "tests")
SOURCES = sorted([*ROOT.glob("megatron_opd/**/*.py"), *ROOT.glob("sglang_bridge/**/*.py")])

# Package -> the packages of ours it may import besides itself. Only `cli` wires concrete parts.
LEAVES = {"types", "config"}
MIDDLE = {"buffer", "losses", "data", "metrics"}
STAGES = {"rollout", "teacher", "learner", "weight_sync", "checkpoint", "transport"}
ALLOWED = {
    "types": set(),
    "config": {"types"},
    **dict.fromkeys(MIDDLE, LEAVES | MIDDLE),
    **dict.fromkeys(STAGES, LEAVES | MIDDLE | STAGES),
    "evaluation": LEAVES | MIDDLE,
    # what an update costs
    "learner": LEAVES | MIDDLE | STAGES | {"planning"},
    # pure arithmetic on a configuration and a model's config.json
    "planning": {"config", "checkpoint", "weight_sync"},
    "controller": LEAVES | MIDDLE,
    "cli": LEAVES | MIDDLE | STAGES | {"controller", "evaluation", "planning"},
    "__main__": {"cli"},
    "__init__": set(),
}
TORCH_FREE = {"types", "config", "buffer", "controller", "rollout", "teacher", "metrics"}
TORCH_FREE |= {"planning"}
HEAVY = {"torch", "megatron", "sglang", "transformer_engine"}


def imported_modules(path: Path) -> set[str]:
    """Every module named in an import statement of `path`, nested ones included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            names.add(node.module or "")
            # `from megatron_opd import types` names a package of ours too
            if node.module == "megatron_opd":
                names.update(f"megatron_opd.{alias.name}" for alias in node.names)
    return names


def package_of(path: Path) -> str:
    """`types`, `config`, ...: the first name below the distribution package."""
    return path.relative_to(ROOT).with_suffix("").parts[1]


def violations(path: Path, modules: set[str]) -> list[str]:
    """Lines that say which rule an import of `path` breaks."""
    package, found = package_of(path), []
    top = path.relative_to(ROOT).parts[0]
    for module in sorted(modules):
        parts = module.split(".")
        if top == "sglang_bridge":
            server = package == "server"
            if parts[0] == "megatron_opd":
                found.append(f"{path}: sglang_bridge must not import {module}")
            if not server and (parts[0] in HEAVY or parts[:2] == ["sglang_bridge", "server"]):
                found.append(f"{path}: the client side must not import {module}")
            continue
        if parts[0] == "megatron_opd" and len(parts) > 1:
            if (
                parts[1] != package
                and parts[1] not in ALLOWED[package]
                and parts[1] != "__version__"
            ):
                found.append(f"{path}: {package} must not import {module}")
        elif parts[0] == "sglang":
            found.append(f"{path}: only sglang_bridge.server imports sglang")
        elif parts[:2] == ["sglang_bridge", "server"] and package != "cli":
            found.append(f"{path}: only cli starts servers")
        elif parts[0] == "megatron" and package not in {"learner", "checkpoint"} | (
            {"weight_sync"} if path.name == "sender.py" else set()
        ):
            found.append(f"{path}: only learner, checkpoint and weight_sync/sender import megatron")
        elif parts[0] in HEAVY and package in TORCH_FREE:
            found.append(f"{path}: {package} is torch-free, imports {module}")
    return found


def test_every_import_follows_the_direction():
    assert len(SOURCES) > 10
    broken = [line for path in SOURCES for line in violations(path, imported_modules(path))]
    assert not broken, "\n".join(broken)


@cache
def defined_in(path: Path) -> set[str]:
    """The names that a module makes itself, at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            names |= {
                part.id
                for part in ast.walk(node)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
    return names


def test_every_name_is_imported_from_where_it_is_defined():
    """Else a module cannot drop an import without breaking strangers."""
    ours = {path for top in TOPS for path in ROOT.glob(f"{top}/**/*.py")}
    second_hand: list[str] = []
    for path in sorted(ours):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            source = ROOT / f"{str(getattr(node, 'module', '')).replace('.', '/')}.py"
            if isinstance(node, ast.ImportFrom) and source in ours:
                names = {alias.name for alias in node.names} - defined_in(source)
                second_hand += [f"{path}: {name} of {node.module}" for name in sorted(names)]
    assert not second_hand, "\n".join(second_hand)


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("megatron_opd/buffer/permits.py", "torch"),
        ("megatron_opd/controller/controller.py", "megatron_opd.learner.learner"),
        ("megatron_opd/types.py", "megatron_opd.config.schema"),
        ("megatron_opd/transport/zmq.py", "megatron.core"),
        ("megatron_opd/rollout/generator.py", "sglang"),
        ("sglang_bridge/client.py", "megatron_opd.types"),
        ("sglang_bridge/client.py", "torch"),
    ],
)
def test_the_rules_can_fail(file: str, module: str):
    assert violations(ROOT / file, {module})
