"""Judges short answers to questions of fact: a response is right where it names the answer.

opd run examples/smollm2/distil.yaml     # data.task: examples.smollm2.facts:named
"""

import re


def named(response: str, answer: str) -> bool:
    """Return whether the response holds the answer as words; `a|b`: any of several."""
    words = " ".join(re.findall(r"\w+", response.casefold()))
    return any(re.search(rf"\b{re.escape(each.casefold())}\b", words) for each in answer.split("|"))
