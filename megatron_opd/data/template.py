"""Says which chat template a run has, and what it reads besides messages: a clock, chance.

Invariant: whatever renders the prompts of one run uses one template and gives it one moment, those
of the run's start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOCK = "strftime_now"
"""Name by which transformers gives a template the time of the call."""
DEFAULT, TOOLS = "default", "tool_use"
"""Names that transformers looks for among several templates."""
MAX_BYTES = 2**20
"""Bytes of the largest template file; those of public models have a few thousand."""

Source = str | dict[str, str] | None
"""The text of a template, or of several by name."""


def this_moment() -> datetime:
    """Return the local time, as transformers gives it to a template, in whole seconds."""
    return datetime.now().replace(microsecond=0)


@dataclass(frozen=True, slots=True)
class RunTemplate:
    """Holds what prompts of one run are rendered with from its start on, whatever changes since.

    clock: the moment that templates are given. origin: the file or the model that the template came
    from. source: its text; both None where no template is used. own: it is a file of the user's.
    teachers: origin and text of those of teachers that have one of their own, by role.
    """

    clock: datetime = field(default_factory=this_moment)
    origin: str | None = None
    source: Source = None
    own: bool = False
    teachers: Mapping[str, tuple[str, Source]] = field(
        default_factory=dict[str, tuple[str, Source]]
    )

    @property
    def exported(self) -> str | None:
        """Returns the text that an exported model has in place of its own template, if any."""
        return self.source if self.own and isinstance(self.source, str) else None

    def as_json(self) -> dict[str, Any]:
        """Return it as it is kept."""
        kept = {"clock": self.clock.isoformat(), "origin": self.origin, "source": self.source}
        return kept | {"own": self.own, "teachers": dict(self.teachers)}

    @classmethod
    def from_json(cls, kept: Any) -> RunTemplate:
        """Return what was kept. ValueError: it is damaged."""
        try:
            clock = datetime.fromisoformat(kept["clock"])
            origin, source, own = kept["origin"], kept["source"], kept["own"]
            teachers = {role: (of, text) for role, (of, text) in kept.get("teachers", {}).items()}
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ValueError("not a template and its clock") from None
        every = [(origin, source), *teachers.values()]
        if clock.tzinfo is not None or type(own) is not bool or not all(map(_is_kept, every)):
            raise ValueError("not a template and its clock")
        return cls(clock, origin, source, own, teachers)


def _is_kept(template: tuple[Any, Any]) -> bool:
    origin, source = template
    texts = [*source.keys(), *source.values()] if isinstance(source, dict) else [source]
    return all(text is None or isinstance(text, str) for text in (origin, *texts))


def read_template(path: Path, key: str = "data.chat_template") -> str:
    """Return the text of a template file as transformers reads one, without a byte-order mark.

    key: what named it. ValueError: it cannot be read, or holds none.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{key}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {path} is not UTF-8: {error}") from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"{key}: {path} must have at most {MAX_BYTES} bytes")
    if not text.strip():
        raise ValueError(f"{key}: {path} must hold a Jinja template, it is blank")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def use_template(tokenizer: PreTrainedTokenizerBase, named: bool | Path) -> None:
    """Give a tokenizer the template that a configuration names. ValueError: as read_template."""
    if isinstance(named, Path):
        tokenizer.chat_template = read_template(named)


def sources(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the text of each of a tokenizer's chat templates by name; one alone is DEFAULT."""
    template: Any = tokenizer.chat_template
    if template is None:
        return {}
    return dict(template) if isinstance(template, dict) else {DEFAULT: str(template)}


def names_in(source: str) -> set[str]:
    """Return the names and texts in the code of a template; its comments and its text have none."""
    return {value.strip("'\"") for kind, value in _code(source) if kind in ("name", "string")}


def reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a template of the tokenizer names the clock."""
    return any(CLOCK in names_in(source) for source in sources(tokenizer).values())


def chance_in(source: str) -> str | None:
    """Return what makes a template's text a matter of chance, None where nothing does."""
    code = [(kind, value) for kind, value in _code(source) if kind != "whitespace"]
    for before, (kind, value) in zip([("", ""), *code], code, strict=False):
        filtered = before == ("operator", "|") or before == ("operator", "(")  # map('random')
        if kind == "name" and value == "lipsum":
            return "lipsum()"
        if value.strip("'\"") == "random" and filtered:
            return "the filter random"
    return None


def _code(source: str) -> Iterator[tuple[str, str]]:
    from jinja2 import Environment, TemplateSyntaxError

    try:
        for _, kind, value in Environment().lex(source):
            yield kind, value
    except TemplateSyntaxError:
        return  # rendering says where
