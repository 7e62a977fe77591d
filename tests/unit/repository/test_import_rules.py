"""The direction of imports, read from the syntax trees so that lazy imports count too."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tools.house import AROUND, LAYERS, ONLY, SERVES, TORCH_FREE

TOPS = ("megatron_opd", "sglang_bridge", *AROUND, "tools", "tests")
SOURCES = sorted([*ROOT.glob("megatron_opd/**/*.py"), *ROOT.glob("sglang_bridge/**/*.py")])

LONGEST, LONGEST_NESTED = 17, 20
"""Most modules of a chain of imports; nested: where imports in functions count too."""
HEAVY = {"torch", "megatron", "sglang", "transformer_engine"}
# What learner ranks and server ranks do alike with tensors; the client side stays free of it.
WITH_TORCH = {
    f"sglang_bridge.weights.{name}"
    for name in ("background", "changes", "dequantise", "digest", "exchange", "posting", "quantise")
} | {
    f"sglang_bridge.weights.{name}"
    for name in ("device_lane", "flat", "host_lane", "lanes", "legs", "same_host")
}

# servers and readers of checkpoints de-quantise alike
READS = {("sglang_bridge.weights.dequantise", "checkpoint")}


@cache
def syntax(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported_modules(path: Path) -> set[str]:
    """Every module named in an import statement of `path`, nested ones included."""
    names: set[str] = set()
    for node in syntax(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            names.add(node.module or "")
            # `from megatron_opd import records` names a package of ours too
            if node.module == "megatron_opd":
                names.update(f"megatron_opd.{alias.name}" for alias in node.names)
    return names


def package_of(path: Path) -> str:
    """`records`, `config`, ...: the first name below the distribution package."""
    return path.relative_to(ROOT).with_suffix("").parts[1]


def is_entry(path: Path) -> bool:
    """Whether it begins a process of its own, as which it may build all that it needs."""
    return path.name == "__main__.py" and path.parent != ROOT / "megatron_opd"


HOUSE = set[str]().union(*LAYERS)


def allowed(package: str) -> set[str]:
    """The other packages of ours that `package` may import."""
    (level,) = (i for i, layer in enumerate(LAYERS) if package in layer)
    return ONLY.get(package, set[str]().union(*LAYERS[: level + 1]) - {package})


def violations(path: Path, modules: set[str]) -> list[str]:
    """Lines that say which rule an import of `path` breaks."""
    package, found = package_of(path), []
    top = path.relative_to(ROOT).parts[0]
    for module in sorted(modules):
        parts = module.split(".")
        if top == "sglang_bridge":
            server = package == "server" or module_name(path) in WITH_TORCH
            if parts[0] == "megatron_opd":
                found.append(f"{path}: sglang_bridge must not import {module}")
            heavy = parts[0] in HEAVY or parts[:2] == ["sglang_bridge", "server"]
            if not server and (heavy or module in WITH_TORCH):
                found.append(f"{path}: the client side must not import {module}")
            continue
        if parts[0] == "megatron_opd" and len(parts) > 1:
            if parts[-1] == "__main__" and len(parts) > 2:
                found.append(f"{path}: nobody imports the entry {module}")
            free = {package, "__version__"} | (HOUSE - {"cli"} if is_entry(path) else set[str]())
            if parts[1] not in allowed(package) | free:
                found.append(f"{path}: {package} must not import {module}")
        elif parts[0] == "sglang":
            found.append(f"{path}: only sglang_bridge.server imports sglang")
        elif parts[:2] == ["sglang_bridge", "server"] and package not in SERVES:
            found.append(f"{path}: only {', '.join(sorted(SERVES))} start servers")
        elif parts[0] == "megatron" and package != "learner":
            found.append(f"{path}: only learner imports megatron")
        elif module in WITH_TORCH and package != "weight_sync" and (module, package) not in READS:
            found.append(f"{path}: only weight_sync exchanges weights")
        elif parts[0] in HEAVY and package in TORCH_FREE:
            found.append(f"{path}: {package} is torch-free, imports {module}")
    return found


def imports_ray_badly(path: Path) -> list[str]:
    """Lines that say where Ray, which is optional, is imported by others, or at once."""
    name, found = path.relative_to(ROOT).as_posix(), []
    for node in syntax(path):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        if "ray" not in {module.split(".")[0] for module in modules}:
            continue
        if not name.startswith("megatron_opd/launch/ray_"):
            found.append(f"{name}: only megatron_opd/launch/ray_*.py imports Ray")
        elif node.col_offset == 0:
            found.append(f"{name}: Ray is optional, so it is imported where it is used")
    return found


def test_ray_is_imported_by_its_launcher_where_it_is_used():
    assert [line for path in SOURCES for line in imports_ray_badly(path)] == []


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("run/run.py", "def f():\n    from ray.util import x", "only megatron_opd/launch/ray_"),
        ("launch/ray_toy.py", "import os, ray.util", "optional"),
    ],
)
def test_the_rule_for_ray_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, word: str
):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "megatron_opd" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (line,) = imports_ray_badly(path)
    assert word in line


def test_every_import_follows_the_direction():
    assert len(SOURCES) > 10
    broken = [line for path in SOURCES for line in violations(path, imported_modules(path))]
    assert not broken, "\n".join(broken)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported, and those for type checkers; no function's."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from at_import(node)


def module_graph(*, nested: bool = True) -> dict[str, set[str]]:
    """{module: modules of ours that it imports}; a package stands for its __init__.

    nested: imports in functions count too.
    """
    names = {path: module_name(path) for path in SOURCES}
    graph: dict[str, set[str]] = {}
    for path, name in names.items():
        graph[name] = {
            found
            for node in (syntax(path) if nested else at_import(syntax(path)[0]))
            if isinstance(node, ast.ImportFrom)
            for found in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            if found in names.values() and found != name
        }
    return graph


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the next, as many as there are."""
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(graph).static_order():
        below = (chains[each] for each in graph.get(module, ()))
        chains[module] = [module, *max(below, key=len, default=[])]
    return max(chains.values(), key=len)


def too_long(graph: dict[str, set[str]], limit: int) -> list[str]:
    """The longest chain of imports, a line a module, if it has more than `limit` modules."""
    chain = longest_chain(graph)
    return [] if len(chain) <= limit else [f"{len(chain)} modules, {limit} at most", *chain]


@pytest.mark.parametrize(("nested", "limit"), [(False, LONGEST), (True, LONGEST_NESTED)])
def test_no_chain_of_imports_is_longer(nested: bool, limit: int):
    """A reader climbs it; it is shortened where a type stands apart from the parts that use it."""
    chain = too_long(module_graph(nested=nested), limit)
    assert not chain, "\n".join(chain)


def test_a_chain_that_is_too_long_is_told():
    graph = {"top": {"left", "leaf"}, "left": {"low"}, "low": {"leaf"}, "other": {"low"}}
    assert too_long(graph, 4) == []
    assert too_long(graph, 3) == ["4 modules, 3 at most", "top", "left", "low", "leaf"]


def test_only_imports_in_functions_are_none_of_the_modules_own():
    text = """
if TYPE_CHECKING:
    from records import types
class A:
    from records import columns
def f():
    from records import seeds
"""
    found = [node.names[0].name for node in at_import(ast.parse(text)) if hasattr(node, "names")]
    assert found == ["types", "columns"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_name(module: str) -> str:
    """`megatron_opd.PACKAGE`, `sglang_bridge` (what clients need) or `sglang_bridge.server`."""
    parts = module.split(".")
    client = parts[0] == "sglang_bridge" and "server" not in parts
    entry = parts[-1] == "__main__" and not client
    return module if entry else ".".join(parts[: 1 if client else 2])


def package_graph(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for name, imported in modules.items():
        packages = {package_name(module) for module in imported}
        graph.setdefault(package_name(name), set()).update(packages - {package_name(name)})
    return graph


def test_no_packages_and_no_modules_import_each_other():
    """Prints the packages in an order in which each imports earlier ones alone."""
    modules = module_graph()
    packages = package_graph(modules)
    for package in TopologicalSorter(packages).static_order():
        print(package, "<-", ", ".join(sorted(packages[package])) or "nothing")  # noqa: T201
    assert len(list(TopologicalSorter(modules).static_order())) == len(SOURCES)


def test_a_cycle_is_found():
    modules = module_graph()
    modules["megatron_opd.records.types"].add("megatron_opd.batching.shares")
    with pytest.raises(CycleError, match=r"megatron_opd\.records\.types"):
        list(TopologicalSorter(modules).static_order())


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
        for node in syntax(path):
            if not isinstance(node, ast.ImportFrom):
                continue
            source = ROOT / f"{str(node.module).replace('.', '/')}.py"
            if source in ours:
                names = {alias.name for alias in node.names} - defined_in(source)
                second_hand += [f"{path}: {name} of {node.module}" for name in sorted(names)]
    assert not second_hand, "\n".join(second_hand)


def around_violations(path: Path, modules: set[str]) -> list[str]:
    """Lines that say which of AROUND a file imports and must not; tools and tests may all."""
    top = path.relative_to(ROOT).parts[0]
    barred = set(AROUND) - AROUND.get(top, set()) - {top}
    found = sorted(module for module in modules if module.partition(".")[0] in barred)
    return [f"{path}: {top} must not import {module}" for module in found]


def test_checks_studies_and_benchmarks_follow_their_direction():
    around = sorted(path for top in AROUND for path in ROOT.glob(f"{top}/**/*.py"))
    assert len(around) > 200
    for path in [*SOURCES, *around]:
        assert around_violations(path, imported_modules(path)) == []


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("harness/driver.py", "benchmarks.step"),
        ("benchmarks/step.py", "checks"),
        ("checks/elastic.py", "studies.grid.trials"),
        ("studies/guard.py", "checks.bring.data"),
        ("megatron_opd/errors.py", "harness.tree"),
        ("sglang_bridge/client.py", "benchmarks.passes"),
    ],
)
def test_the_direction_around_the_product_can_fail(file: str, module: str):
    assert around_violations(ROOT / file, {module, "json"})
    assert not around_violations(ROOT / file, {"json"})


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("megatron_opd/buffer/permits.py", "torch"),
        ("megatron_opd/controller/controller.py", "megatron_opd.learner.learner"),
        ("megatron_opd/records/types.py", "megatron_opd.config.schema"),
        ("megatron_opd/transport/remote_learner.py", "megatron.core"),
        ("megatron_opd/models/gather.py", "megatron_opd.learner.world"),
        ("megatron_opd/checkpoint/convert.py", "megatron_opd.learner.world"),
        ("megatron_opd/losses/terms.py", "megatron_opd.batching.advantages"),
        ("megatron_opd/rollout/generator.py", "sglang"),
        ("sglang_bridge/client.py", "megatron_opd.records.types"),
        ("sglang_bridge/client.py", "torch"),
    ],
)
def test_the_rules_can_fail(file: str, module: str):
    assert violations(ROOT / file, {module})
