"""Responses of a model under the `exact` verifier, which must never fail and never take long."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from hypothesis import strategies as st

from benchmarks.fuzz.engine import Target
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
numerals = st.builds(
    lambda sign, whole, part: f"{sign}{whole}{part}",
    st.sampled_from(("", "-", "+")),
    st.integers(0, 10**7),
    st.sampled_from(("", ".5", ".25", ".0")),
)
wrapped = st.sampled_from(
    (
        *("{}", "**{}**", "\\boxed{{{}}}", "The answer is {}.", "so\n${}$", "#### {}"),
        *("Answer: **{}**.", "**The answer is {}.**", "\\(\\text{{{}}}\\)", "$\\boxed{{{}}}$."),
    )
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


hostile = st.lists(st.sampled_from(PARTS), max_size=30).map("".join)
long = st.tuples(st.sampled_from(PARTS), st.integers(1000, 30_000)).map(lambda x: x[0] * x[1])

TARGET = Target(
    "exact_answers",
    st.one_of(
        st.tuples(hostile, hostile),
        st.tuples(st.text(), st.text()),
        st.tuples(long, hostile),
        st.builds(Numerals, wrapped, numerals, numerals, st.booleans()),
        numerals.flatmap(
            lambda n: st.builds(Numerals, wrapped, st.just(n), st.just(n), st.booleans())
        ),
    ),
    call,
    (),
    oracle,
)
