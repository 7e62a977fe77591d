"""Compile to bytecode what a first run imports, and nothing else of what is installed.

    .venv/bin/python tools/compile_imports.py

A virtual environment of this project holds 21,000 source files; a run imports 6,000 of them.
Import statements are followed from the programs of a run, through every package: those that a
module executes when it is imported, and in this project's own files those of functions too. What
is missed (imports by computed names, in functions) Python compiles when it first imports it.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import cast

PROJECT = Path(__file__).resolve().parents[1]
OWN = ("megatron_opd", "sglang_bridge")
PROGRAMS = (
    "megatron_opd.__main__",
    "megatron_opd.learner.__main__",
    "sglang_bridge.server.__main__",
    "sglang_bridge.server.plugin",
    # what SGLang and torchrun import by name or inside a function
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "torch.distributed.run",
    "torch._inductor.compile_fx",
    "networkx",
    # what a Ray cluster starts on each machine
    "ray._private.log_monitor",
    "ray._private.runtime_env.agent.main",
    "ray._private.workers.default_worker",
    "ray.dashboard.agent",
    "ray.dashboard.dashboard",
    "ray.dashboard.modules.job.job_head",
)
STEP = 8  # modules that a worker takes at a time


def roots() -> tuple[Path, ...]:
    """Where modules are looked for; the standard library brings its own bytecode."""
    return PROJECT, Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))


def find(name: str, places: tuple[Path, ...]) -> Path | None:
    """The source file of a module, None where it has none there."""
    for place in places:
        base = place.joinpath(*name.split("."))
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def statements(code: CodeType, *, functions: bool) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Import statements of a module as (module, level, names); `functions`: also inside those.

    Read from the bytecode, which costs a twentieth of a syntax tree: an import's level and names
    are the two constants loaded just before it. What stands under `if TYPE_CHECKING` is left out.
    """
    loaded: list[object] = []
    before, resume = "", 0
    for instruction in dis.get_instructions(code):
        name, before = before, str(instruction.argval)
        if instruction.offset < resume:
            continue
        if name == "TYPE_CHECKING" and "JUMP" in instruction.opname:
            resume = instruction.argval
        elif instruction.opname == "IMPORT_NAME":
            level, names = loaded[-2:]
            yield instruction.argval, cast(int, level), cast("tuple[str, ...]", names or ())
        elif instruction.opname == "LOAD_CONST":
            loaded.append(instruction.argval)
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for part in inner if functions else ():
        yield from statements(part, functions=True)


def imported(name: str, is_package: bool, code: CodeType) -> set[str]:
    """Modules that module `name` may import; `from a import b` names a and a.b."""
    found: set[str] = set()
    for module, level, names in statements(code, functions=name.partition(".")[0] in OWN):
        parts = name.split(".")
        # one level is the package of the module, which of a package is itself
        base = parts[: len(parts) - level + is_package] if level else []
        package = ".".join([*base, *filter(None, [module])])
        found.add(package)
        found.update(f"{package}.{inner}" for inner in names)
    parents = {name.rpartition(".")[0] for name in found | {name}}
    return (found | parents) - {""}


def compiled(places: tuple[Path, ...], name: str) -> tuple[bool, set[str]]:
    """Compile one module: whether it has a source file, and what it imports."""
    file = find(name, places)
    if file is None:
        return False, set()
    sys.dont_write_bytecode = False  # whatever PYTHONDONTWRITEBYTECODE says: it is the purpose here
    try:
        code = SourceFileLoader(name, str(file)).get_code(name)  # writes the bytecode
    except (SyntaxError, ValueError):  # written for another version of Python
        return False, set()
    return True, imported(name, file.name == "__init__.py", cast(CodeType, code))


def compile_reachable(programs: tuple[str, ...], places: tuple[Path, ...]) -> int:
    """Compile `programs` and what they import, a core for each worker; returns how many."""
    count, seen, wave = 0, set(programs), list(programs)
    with ProcessPoolExecutor() as workers:
        while wave:
            results = list(workers.map(partial(compiled, places), wave, chunksize=STEP))
            count += sum(has_source for has_source, _ in results)
            wave = sorted(set().union(*(names for _, names in results)) - seen)
            seen.update(wave)
    return count


if __name__ == "__main__":
    compile_reachable(PROGRAMS, roots())
