"""Few parameters, short functions, small files, and no attribute that waits to be given its value.

Each rule yields what breaks it in a source; below, a source that breaks it.
"""

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.support.paths import ROOT
from tools.house import AROUND

MOST_PARAMETERS, MOST_FUNCTION_LINES, MOST_FILE_LINES = 8, 80, 500
TOPS = ("megatron_opd", "sglang_bridge", *AROUND, "tools", "examples", "tests")
KERNELS = ("megatron_opd/losses/kernels.py", "sglang_bridge/server/kernels.py")
"""A kernel is launched with every pointer and size that it uses."""
ENGINES = ("megatron_opd/learner/", "sglang_bridge/server/", "benchmarks/beside_trl/", "tests/")
"""Functions here may stand in for one of Megatron's, SGLang's or TRL's, and take what it takes."""
BEGUN = ("megatron_opd/run/", "megatron_opd/fleet/", "megatron_opd/inputs/")
"""What a run is made of: a stage exists whole, or not at all."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Nodes = Sequence[ast.AST]


def parameters(name: str, nodes: Nodes) -> Iterator[str]:
    """No function outside kernels takes more than eight; `**options: Any` hides any number.

    A function that takes *args too, or stands in for an engine's, passes on what that one takes.
    """
    for node in nodes:
        if not isinstance(node, Function) or name in KERNELS:
            continue
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([each for each in given if each.arg not in ("self", "cls")])
        if count > MOST_PARAMETERS:
            yield f"{node.name} takes {count} parameters"
        options = node.args.kwarg if node.args.vararg is None else None
        typed = None if options is None or name.startswith(ENGINES) else options.annotation
        if typed is not None and ast.unparse(typed) == "Any":
            yield f"{node.name} takes **Any"


def starred_displays(name: str, nodes: Nodes) -> Iterator[str]:
    """What is in a tuple, list or dict that is written down in a call can be its arguments.

    Keyword arguments whose names the program computes cannot.
    """
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        starred = [each.value for each in node.args if isinstance(each, ast.Starred)]
        plain = any(isinstance(value, ast.Tuple | ast.List) for value in starred)
        named = [each.value for each in node.keywords if each.arg is None]
        keys = [key for value in named if isinstance(value, ast.Dict) for key in value.keys]
        if any(isinstance(key, ast.Constant) and str(key.value).isidentifier() for key in keys):
            yield f"{ast.unparse(node.func)}(**{{...}}) can be written without the stars"
        if plain:
            yield f"{ast.unparse(node.func)}(*(...)) can be written without the star"


def long_functions(name: str, nodes: Nodes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Function) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                yield f"{node.name} has {lines} lines"


def not_started_yet(name: str, nodes: Nodes) -> Iterator[str]:
    """No attribute of a run's parts is None, or missing, until something has happened.

    None is a value like others where nothing replaces it: in a field of a frozen record, and in an
    attribute that a parameter gives. So no statement gives an attribute None, only frozen records
    have fields that are None by default, and __init__ gives every attribute its first value. Nor
    does anything assert that a value is there by now.
    """
    for node in nodes if name.startswith(BEGUN) else ():
        if isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test):
            yield f"assert {ast.unparse(node.test)}"
        for target, value in assigned(node):
            if isinstance(target, ast.Attribute) and (value is None or is_none(value)):
                yield f"{ast.unparse(target)} has no value at first"
        if isinstance(node, ast.ClassDef) and not is_frozen(node):
            fields = [pair for statement in node.body for pair in assigned(statement)]
            for field, value in fields:
                if is_none(value):
                    yield f"{node.name}.{ast.unparse(field)} has no value at first"
            known = {ast.unparse(field) for field, _ in fields} | given_in(node, "__init__")
            for method in node.body:
                if isinstance(method, Function):
                    for late in sorted(given_in(node, method.name) - known):
                        yield f"{node.name}.{late} is missing until {method.name}"


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Every target of an assignment with its value; those of tuples one by one."""
    if isinstance(node, ast.AnnAssign):
        yield node.target, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        values = getattr(node.value, "elts", ()) if isinstance(target, ast.Tuple) else ()
        same = len(values) == len(targets)
        yield from zip(targets, values if same else [node.value] * len(targets), strict=True)


def is_none(node: ast.expr | None) -> bool:
    """Whether a value is None, or makes a field that is None by default."""
    if isinstance(node, ast.Call):
        return any(each.arg == "default" and is_none(each.value) for each in node.keywords)
    return isinstance(node, ast.Constant) and node.value is None


def is_frozen(node: ast.ClassDef) -> bool:
    made = ast.unparse([*node.decorator_list, *node.keywords, *node.bases])
    return "frozen=True" in made or "NamedTuple" in made


def given_in(node: ast.ClassDef, method: str) -> set[str]:
    """The attributes of `self` that a method of a class assigns."""
    bodies = [each for each in node.body if isinstance(each, Function) and each.name == method]
    pairs = [pair for body in bodies for each in ast.walk(body) for pair in assigned(each)]
    targets = [target for target, _ in pairs if isinstance(target, ast.Attribute)]
    return {each.attr for each in targets if ast.unparse(each.value) == "self"}


def broken(name: str, text: str) -> list[str]:
    """What a source breaks."""
    nodes = tuple(ast.walk(ast.parse(text)))
    rules = (parameters, starred_displays, long_functions, not_started_yet)
    found = [line for rule in rules for line in rule(name, nodes)]
    lines = text.count("\n")
    return [*found, f"{lines} lines"] if lines > MOST_FILE_LINES else found


def test_every_source_keeps_the_rules():
    paths = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))]
    assert len(paths) > 1000
    found: set[str] = set()
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        found |= {f"{name}: {line}" for line in broken(name, path.read_text(encoding="utf-8"))}
    assert not found


RUN = "megatron_opd/run/a.py"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("tools/a.py", "def f(a, b, /, c, d, *, e, f, g, h, i): ...", "f takes 9 parameters"),
        ("tools/a.py", "async def f(**options: Any): ...", "f takes **Any"),
        ("tests/a.py", "f(*(a, b), c)", "f(*(...)) can be written without the star"),
        ("tests/a.py", "a.f(*[b])", "a.f(*(...)) can be written without the star"),
        ("tests/a.py", "f(**{'a': 1, **b})", "f(**{...}) can be written without the stars"),
        ("checks/a.py", "def f():\n" + "    ...\n" * 80, "f has 81 lines"),
        ("harness/a.py", "...\n" * 501, "501 lines"),
        (RUN, "def f():\n    assert a.b is not None", "assert a.b is not None"),
        (RUN, "self.a = None", "self.a has no value at first"),
        (RUN, "self.a: Optional[int] = None", "self.a has no value at first"),
        (RUN, "self.a: int", "self.a has no value at first"),
        (RUN, "b, self.a = self.a, None", "self.a has no value at first"),
        (RUN, "class A:\n    a: int | None = None", "A.a has no value at first"),
        (RUN, "@dataclass\nclass A:\n    a: B = field(default=None)", "A.a has no value at first"),
        (RUN, "class A:\n    def f(self): self.a, b = 1, 2", "A.a is missing until f"),
    ],
)
def test_what_breaks_a_rule_is_named(name: str, text: str, line: str):
    assert broken(name, text) == [line]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tools/a.py", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ..."),
        (KERNELS[0], "def f(a, b, c, d, e, f, g, h, i): ..."),
        ("tools/a.py", "def f(*args: Any, **options: Any): return g(*args, **options)"),
        ("tools/a.py", "f(*rows, **{name: 1}, **given)"),
        ("checks/a.py", "def f():\n" + "    ...\n" * 79),
        (RUN, "@dataclass(frozen=True)\nclass A:\n    a: int | None = None"),
        (RUN, "class A(Struct, frozen=True):\n    a: int | None = field(default=None)"),
        (RUN, "class A:\n    def __init__(self, a: int | None = None): self.a, self.b = a, []"),
        ("megatron_opd/launch/a.py", "self.a = None"),
    ],
)
def test_what_keeps_the_rules_is_not(name: str, text: str):
    assert broken(name, text) == []
