"""How many files of the packages one member of each kind is spread over: at most two.

Members without a special role stand for their kind (a default is named wherever defaults are).
That a toy from outside the package works without touching any file is shown by
tests/unit/examples/test_extending.py (objective, verifier, prompts) and
tests/unit/weight_sync/test_transport.py (weight transport).
"""

import re

import pytest

from tests.support.paths import ROOT

PACKAGES = ("megatron_opd", "sglang_bridge")
CONFIG, LOSSES = "megatron_opd/config", "megatron_opd/losses"


def files_with(*words: str) -> set[str]:
    """Source files that hold one of `words` as a whole word or string."""
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words))
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize(
    ("words", "files"),
    [
        pytest.param(
            ("SkewForwardKl", '"skew_forward_kl"'),
            {f"{CONFIG}/objectives.py", f"{LOSSES}/divergences.py"},
            id="objective, a divergence",
        ),
        pytest.param(
            ("Gspo", '"gspo"'),
            {f"{CONFIG}/objectives.py", f"{LOSSES}/terms.py"},
            id="objective, from rewards",
        ),
        pytest.param(("AtomsTailSupport", '"atoms_tail"'), {f"{CONFIG}/supports.py"}, id="support"),
        pytest.param(
            ("MaskedCorrection", '"masked"'),
            {f"{CONFIG}/corrections.py", f"{LOSSES}/corrections.py"},
            id="correction",
        ),
        pytest.param(
            ("block_sparse_moe",),  # what is served besides stands in inputs/served_rules.py
            {"megatron_opd/models/families/family.py", "sglang_bridge/server/pieces.py"},
            id="family with experts of other names",
        ),
        pytest.param(
            ("BROADCAST", '"broadcast"', "megatron_opd.weight_sync.broadcast:BROADCAST"),
            {f"{CONFIG}/sections.py", "megatron_opd/weight_sync/broadcast.py"},
            id="weight transport, beside files of its own",
        ),
    ],
)
def test_one_member_of_a_kind_is_in_at_most_two_files(words: tuple[str, ...], files: set[str]):
    assert files_with(*words) == files
    assert len(files) <= 2
