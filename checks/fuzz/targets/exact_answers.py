"""Responses of a model under the `exact` verifier, which must never fail and never take long."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from random import Random

from checks.fuzz.engine import Target
from checks.fuzz.mutations import joined, one_of
from megatron_opd.data.tasks.exact import verify

PARTS = (
    *(
        "\\boxed{",
        "}",
        "{",
        "\\frac{1}{2}",
        "$",
        "$$",
        "**",
        "####",
        "The answer is ",
        "Answer:",
        ".",
    ),
    *(
        "1,000",
        "42",
        "-42",
        "3.14",
        "1",
        "000",
        ",",
        "\\(",
        "\\)",
        "\n",
        " ",
        "\\text{",
        "\\",
        "`",
        "_",
    ),
)
FORMS = (
    *("{}", "**{}**", "\\boxed{{{}}}", "The answer is {}.", "so\n${}$", "#### {}"),
    *("Answer: **{}**.", "**The answer is {}.**", "\\(\\text{{{}}}\\)", "$\\boxed{{{}}}$."),
)


@dataclass(frozen=True)
class Numerals:
    """`one`, in a wrapper and perhaps with thousands separators, as the answer to `other`."""

    form: str
    one: str
    other: str
    separators: bool

    @property
    def response(self) -> str:
        """What a model writes."""
        return self.form.format(grouped(self.one) if self.separators else self.one)


def grouped(text: str) -> str:
    """With thousands separators."""
    sign, digits = (text[0], text[1:]) if text[0] in "+-" else ("", text)
    whole, dot, part = digits.partition(".")
    return f"{sign}{int(whole):,}{dot}{part}"


def call(given: Numerals | tuple[str, str]) -> bool:
    """Judge a response."""
    if isinstance(given, Numerals):
        return verify(given.response, given.other)
    return verify(*given)


def oracle(given: Numerals | tuple[str, str], right: bool) -> str | None:
    """No numeral is taken for another number, and the same numeral is always right."""
    if not isinstance(given, Numerals):
        return None
    if right and Fraction(given.one) != Fraction(given.other):
        return "a wrong number is judged right"
    return "a right number is judged wrong" if given.one == given.other and not right else None


HOSTILE = joined(PARTS, 30)


def texts(rng: Random) -> tuple[str, str]:
    """Two hostile texts."""
    return HOSTILE(rng), HOSTILE(rng)


def long(rng: Random) -> tuple[str, str]:
    """A part many times over."""
    return rng.choice(PARTS) * rng.randint(1000, 30_000), HOSTILE(rng)


def numeral(rng: Random) -> str:
    """A number in digits."""
    whole = rng.randrange(10 ** rng.randint(1, 7))
    return f"{rng.choice(('', '-', '+'))}{whole}{rng.choice(('', '', '.5', '.25', '.0'))}"


def numerals(rng: Random) -> Numerals:
    """A numeral against itself, or against another, often one with the same digits."""
    one = numeral(rng)
    others = (
        one,
        one,
        numeral(rng),
        one[1:] or "7",
        one + "0",
        one.replace(".", ""),
        one.lstrip("-"),
    )
    other = rng.choice([text for text in others if text and text not in "+-."] or [one])
    return Numerals(rng.choice(FORMS), one, other, rng.random() < 0.5)


TARGET = Target(
    "exact_answers", one_of(texts, long, numerals, numerals, numerals), call, (), oracle
)
