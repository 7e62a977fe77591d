"""Docstrings are plain sentences: the measurable part, read from the syntax trees.

Run with -s to see the figures.
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.support.paths import ROOT

SOURCES = sorted([*ROOT.glob("megatron_opd/**/*.py"), *ROOT.glob("sglang_bridge/**/*.py")])

SENTENCE_ENDS = (".", ":", "?")

# Every verb that a first line may begin with, as an imperative or in the third person. A word that
# is missing here counts as no verb, so that the share is never too high.
VERB_WORDS = """
bring clip correct deliver import introduce isolate judge learn limit lose minimise model offer
pass predict pull ring simulate sort welcome work
act adapt add admit allocate allow answer append apply ask assign average await begin bind block
bound broadcast build cache call carry change check choose close collect combine compare complete
compute concatenate configure connect continue convert copy count cover cut decide declare decode
define derive describe digest discard divide do draw drop empty encode end estimate evaluate execute
exit fill find fine-tune finish flush forget fork form gather give grant group guard halve hand hold
identify implement interleave join keep kill know label lay leave let list listen load locate lock
look make manage map mark mask measure move multiply name normalise note notice observe open pack
parse pause perform place plan poll post prepare present print probe process provide put quantise
quote raise read receive recompute record redirect reduce refresh refuse register reject release
remove render repeat replace replay report represent require reserve reset resume return rewrite
round run sample save say schedule score select send serve set share show size speak split spread
stand start stop store stream sum summarise sync take talk tell time tokenise total touch track
train turn use validate verify wait warn watch weigh wrap write yield
"""
VERBS = frozenset(VERB_WORDS.split())
# After a noun, not after a verb: "Samples of a batch" has none, "Samples one completion" has one.
AFTER_A_NOUN = frozenset({"of", "per", "whose", "is", "are"})


@dataclass(frozen=True)
class Docstring:
    """One docstring. kind: module, class, function or attribute."""

    path: str
    line: int
    kind: str
    name: str
    text: str

    @property
    def first_line(self) -> str:
        return inspect.cleandoc(self.text).partition("\n")[0].strip()

    @property
    def public(self) -> bool:
        return not self.name.startswith("_")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.first_line}"


def text_of(statement: ast.stmt | None) -> str | None:
    """The text of a statement that is a string and nothing more."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else None
    return None


def docstrings_of(path: Path) -> Iterator[Docstring]:
    name = str(path.relative_to(ROOT))
    kinds = {ast.Module: "module", ast.ClassDef: "class"}
    kinds |= dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef), "function")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        kind = kinds.get(type(node))
        if kind is None:
            continue
        body: list[ast.stmt] = node.body
        text = text_of(body[0] if body else None)
        if text is not None:
            yield Docstring(name, body[0].lineno, kind, getattr(node, "name", ""), text)
        if kind == "function":
            continue
        for target, statement in pairwise(body):
            text = text_of(statement)
            if text is not None and isinstance(target, ast.Assign | ast.AnnAssign):
                yield Docstring(name, statement.lineno, "attribute", "", text)


@cache
def docstrings() -> tuple[Docstring, ...]:
    return tuple(found for path in SOURCES for found in docstrings_of(path))


def is_verb(word: str) -> bool:
    """Whether a word is one of VERBS, in its base form or with the third person's ending."""
    stems = [word, word.removesuffix("s"), word.removesuffix("es")]
    stems.append(re.sub("ies$", "y", word))
    return any(stem in VERBS for stem in stems)


def starts_with_verb(line: str) -> bool:
    words = re.findall(r"[A-Za-z'-]+|\S", line)
    if not words:
        return False
    second = words[1].lower() if len(words) > 1 else ""
    return is_verb(words[0].lower()) and second not in AFTER_A_NOUN


@pytest.mark.parametrize(
    ("line", "verb"),
    [
        ("Return the number of ranks.", True),
        ("Copies host arrays to the device.", True),
        ("Samples one completion.", True),
        ("Samples of a batch.", False),
        ("Count of tokens.", False),
        ("Of AdamW.", False),
        ("The bytes.", False),
        ("Whether it is there.", False),
        ("C.", False),
    ],
)
def test_the_heuristic(line: str, verb: bool):
    assert starts_with_verb(line) is verb


def test_no_docstring_begins_with_of():
    assert not [str(d) for d in docstrings() if d.first_line.startswith("Of ")]


def test_public_first_lines_are_whole():
    public = [d for d in docstrings() if d.public and d.kind != "attribute"]
    assert len(public) > 1000
    assert not [str(d) for d in public if not d.first_line.endswith(SENTENCE_ENDS)]
    assert not [str(d) for d in docstrings() if len(d.text.split()) < 3]


def test_first_lines_are_sentences_with_a_verb():
    lines = [d for d in docstrings() if d.kind != "attribute"]
    without = [str(d) for d in lines if not starts_with_verb(d.first_line)]
    share = 1 - len(without) / len(lines)
    of = sum(d.first_line.startswith("Of ") for d in docstrings())
    short = sum(len(d.text.split()) <= 3 for d in docstrings())
    sys.stdout.write(
        f"\n{len(docstrings())} docstrings, {of} begin with 'Of', {short} have three words or "
        f"fewer; {share:.1%} of {len(lines)} first lines begin with a verb\n"
    )
    assert not without, "\n".join(without)


def config_sections() -> list[type[BaseModel]]:
    paths = [path for path in SOURCES if path.parent.name == "config"]
    names = [str(path.relative_to(ROOT)) for path in paths]
    modules = [n.removesuffix(".py").replace("/", ".") for n in names]
    found: list[type[BaseModel]] = []
    for name in modules:
        module = importlib.import_module(name.removesuffix(".__init__"))
        values = [value for value in vars(module).values() if inspect.isclass(value)]
        found += [v for v in values if issubclass(v, BaseModel) and v.__module__ == name]
    return found


def test_every_config_field_is_described():
    sections = config_sections()
    assert len(sections) > 10
    fields = {
        f"{section.__name__}.{name}": field.description or ""
        for section in sections
        for name, field in section.model_fields.items()
        if name != "type"  # names the variant, whose class says what it is
    }
    assert not {name: text for name, text in fields.items() if len(text.split()) < 5}
