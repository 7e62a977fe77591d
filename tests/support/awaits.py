"""Every await of some functions, found in their source, and a fault put in the place of one.

The functions are compiled anew, with each `await X` as `await fault(place, X)` and each
`async with X` as `async with guarded(place, X)`. What a fault does is the test's.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

HOOK, GUARD = "__fault__", "__guarded__"


@dataclass(frozen=True, order=True)
class Place:
    """One await: where it is, and what it waits for as it is written."""

    function: str
    what: str
    number: int

    def __str__(self) -> str:
        return f"{self.function}: await {self.what}"


async def never() -> BaseException:
    """Nothing fails."""
    raise AssertionError("no fault was asked for")


@dataclass
class Faults:
    """What happens at an await.

    at: those that fail. nth: the only pass that fails, from 0; None: every one. raises: gives what
    they raise, or waits until it is cancelled. after: whether what is awaited is done before, as
    what ends a part is. reached: how often each was.
    """

    at: frozenset[Place] = frozenset()
    nth: int | None = None
    raises: Callable[[], Awaitable[BaseException]] = never
    after: Callable[[Place], bool] = lambda place: False
    reached: Counter[Place] = field(default_factory=Counter)

    async def pass_by(self, place: Place, *, done: bool) -> None:
        """Fail if this is the place."""
        if self.after(place) != done:
            return
        number, self.reached[place] = self.reached[place], self.reached[place] + 1
        if place in self.at and self.nth in (None, number):
            raise await self.raises()


class _Places(ast.NodeTransformer):
    """Finds awaits, and puts the hook in front of each."""

    def __init__(self, module: str, leaves_out: Callable[[str, str], bool]) -> None:
        self._names, self._leaves_out = [module], leaves_out
        self.places: list[Place] = []
        self._serial = 0

    def _within(self, node: Any) -> Any:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        return node

    visit_ClassDef = visit_AsyncFunctionDef = visit_FunctionDef = _within

    def _place(self, node: ast.expr) -> ast.Constant | None:
        function, what = ".".join(self._names), ast.unparse(node)
        if self._leaves_out(function, what):
            return None
        self._serial += 1
        self.places.append(Place(function, what, self._serial))
        return ast.Constant(len(self.places) - 1)

    def visit_Await(self, node: ast.Await) -> Any:
        place = self._place(node.value)
        self.generic_visit(node)
        if place is not None:
            # the call is made by the hook: what was made before a fault would never be awaited
            late = ast.Lambda(_no_arguments(), node.value)
            if not any(isinstance(each, ast.Await) for each in ast.walk(node.value)):
                node.value = ast.Call(ast.Name(HOOK, ast.Load()), [place, late], [])
            else:
                node.value = ast.Call(ast.Name(HOOK, ast.Load()), [place, node.value], [])
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> Any:
        for item in node.items:
            place = self._place(item.context_expr)
            if place is not None:
                call = ast.Call(ast.Name(GUARD, ast.Load()), [place, item.context_expr], [])
                item.context_expr = call
        self.generic_visit(node)
        return node


def _no_arguments() -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def instrument(
    modules: list[ModuleType],
    faults: Faults,
    patch: pytest.MonkeyPatch,
    leaves_out: Callable[[str, str], bool] = lambda function, what: False,
) -> list[Place]:
    """Let every await of these modules pass by `faults`; return all of them.

    leaves_out: which awaits are none of the test's, by function and by what they wait for.
    """
    found: list[Place] = []
    for module in modules:
        tree = ast.parse(inspect.getsource(module))
        name = module.__name__.rpartition(".")[2]
        finder = _Places(name, leaves_out)
        tree = ast.fix_missing_locations(finder.visit(tree))
        codes = dict(_functions(compile(tree, module.__file__ or name, "exec")))
        places = finder.places

        async def fault(index: int, work: Any, places: list[Place] = places) -> Any:
            await faults.pass_by(places[index], done=False)
            result = await (work() if isinstance(work, FunctionType) else work)
            await faults.pass_by(places[index], done=True)
            return result

        @asynccontextmanager
        async def guarded(
            index: int, context: AbstractAsyncContextManager[Any], places: list[Place] = places
        ) -> AsyncIterator[Any]:
            await faults.pass_by(places[index], done=False)
            async with context as entered:
                yield entered

        patch.setitem(vars(module), HOOK, fault)
        patch.setitem(vars(module), GUARD, guarded)
        for function in _defined_in(module):
            code = codes.get(function.__qualname__)
            if code is not None:
                patch.setattr(function, "__code__", code)
        found += places
    return found


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            if "<locals>" not in constant.co_qualname:
                yield from _functions(constant)


def _defined_in(module: ModuleType) -> Iterator[FunctionType]:
    spaces = [module, *(c for c in vars(module).values() if inspect.isclass(c))]
    for space in spaces:
        for value in list(vars(space).values()):
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function
