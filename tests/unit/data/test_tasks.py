"""The built-in arithmetic task against Python's own arithmetic, and the verifiers on bad input."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.data.tasks import TASKS, get_task, get_verifier
from megatron_opd.data.tasks.arithmetic import (
    MAX_DIGITS,
    MIN_DIGITS,
    OPERATIONS,
    _pair,
    bucket_size,
    careless,
    solve,
)

numbers = st.integers(0, 10**MAX_DIGITS - 1)


@given(left=numbers, right=numbers, operation=st.sampled_from(OPERATIONS))
def test_every_column_of_a_solution_follows_the_rules_of_columns(left, right, operation):
    if operation == "-":
        left, right = max(left, right), min(left, right)
    problem = solve(left, operation, right)
    *columns, last = problem.response.split("\n")
    expected = left + right if operation == "+" else left - right
    assert problem.prompt == f"{left}{operation}{right}=\n"
    assert last == f"#{expected}" == f"#{problem.answer}"
    width = len(str(max(left, right)))
    assert len(columns) == width
    upper, lower = (str(number).zfill(width)[::-1] for number in (left, right))
    carry, digits = 0, ""
    for column, a, b in zip(columns, upper, lower, strict=True):
        total = int(a) + int(b) + carry if operation == "+" else int(a) - int(b) - carry
        carried = int(total > 9) if operation == "+" else int(total < 0)
        mark = "c" if operation == "+" else "b"
        assert column == f"{a}{operation}{b}{operation}{carry}={total % 10}{mark}{carried}"
        carry, digits = carried, str(total % 10) + digits
    assert int(str(carry) + digits if operation == "+" else digits) == expected
    assert get_verifier("arithmetic")(problem.response, problem.answer)


@pytest.mark.parametrize(
    ("left", "operation", "right", "response", "answer"),
    [
        (57, "+", 68, "7+8+0=5c0\n5+6+0=1c0\n#15", "125"),
        (503, "-", 68, "3-8-0=5b0\n0-6-0=4b0\n5-0-0=5b0\n#545", "435"),
        (1000, "-", 999, "0-9-0=1b0\n0-9-0=1b0\n0-9-0=1b0\n1-0-0=1b0\n#1111", "1"),
        (12, "+", 34, "2+4+0=6c0\n1+3+0=4c0\n#46", "46"),
    ],
)
def test_careless_solutions_forget_every_carry_at_rate_one(
    left, operation, right, response, answer
):
    problem = careless(solve(left, operation, right), 1.0, random.Random(0))
    assert (problem.response, problem.answer) == (response, answer)
    assert problem.prompt == f"{left}{operation}{right}=\n"
    assert get_verifier("arithmetic")(response, answer) is (left == 12)


def test_careless_solutions_at_rate_zero_are_right_and_at_a_half_some_are():
    problems = get_task("arithmetic").generate(300, 0, 1)[0]
    rng = random.Random(0)
    assert [careless(problem, 0.0, rng) for problem in problems] == problems
    right = sum(careless(problem, 0.5, rng).response == problem.response for problem in problems)
    assert 100 < right < 250


@pytest.mark.parametrize(
    ("left", "operation", "right"), [(3, "*", 2), (2, "-", 3), (-1, "+", 3), (1, "+", -3)]
)
def test_a_problem_outside_the_task_is_refused(left, operation, right):
    with pytest.raises(ValueError, match=r"operation|operands"):
        solve(left, operation, right)


@given(seed=st.integers(0, 2**32), train=st.integers(0, 400), heldout=st.integers(0, 200))
def test_sets_never_overlap_and_are_balanced(seed, train, heldout):
    sets = get_task("arithmetic").generate(train, heldout, seed)
    assert [len(problems) for problems in sets] == [train, heldout]
    prompts = [problem.prompt for problems in sets for problem in problems]
    assert len(set(prompts)) == len(prompts)
    buckets = len(OPERATIONS) * (MAX_DIGITS - MIN_DIGITS + 1)
    for problems in sets:
        counts = {}
        for problem in problems:
            operation = next(o for o in OPERATIONS if o in problem.prompt)
            operands = problem.prompt.removesuffix("=\n").split(operation)
            key = operation, max(len(operand) for operand in operands)
            counts[key] = counts.get(key, 0) + 1
        floor = len(problems) // buckets
        assert set(counts.values()) <= {floor, floor + 1}
        assert {digits for _, digits in counts} <= set(range(MIN_DIGITS, MAX_DIGITS + 1))


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    generate = get_task("arithmetic").generate
    assert generate(50, 20, 3) == generate(50, 20, 3)
    assert generate(50, 20, 3) != generate(50, 20, 4)


def test_the_enumeration_of_two_digit_pairs_is_complete():
    expected = [(left, right) for left in range(10, 100) for right in range(left + 1)]
    assert bucket_size(2) == len(expected)
    assert [_pair(index, 2) for index in range(bucket_size(2))] == expected


def test_more_problems_than_exist_are_refused():
    with pytest.raises(ValueError, match=r"train \+ heldout must be <= 29970.*got 29970 \+ 6"):
        get_task("arithmetic").generate(29970, 6, 0)
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        get_task("arithmetic").generate(-1, 0, 0)


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("#12", True),
        ("2+0+0=2c0\n1+0+0=1c0\n#12", True),
        ("#12<eos>#13", True),
        ("#12<eos>\n#12\n9", True),
        (" #12 \n", True),
        ("#13<eos>#12", False),
        ("#12\n#13", False),
        ("#12\n1+1", False),
        ("#012", False),
        ("#1", False),
        ("#123", False),
        ("# 12", False),
        ("12", False),
        ("##12", False),
        ("x#12", False),
        ("#12x", False),
        ("#-12", False),
        ("#", False),
        ("<eos>#12", False),
        ("", False),
        ("\n\n", False),
        ("#١٢", False),
    ],
)
def test_arithmetic_verifier(response, correct):
    assert get_verifier("arithmetic")(response, "12") is correct


@given(response=st.text(), answer=st.text())
def test_verifiers_never_raise(response, answer):
    for name in ("arithmetic", "exact"):
        assert get_verifier(name)(response, answer) in (True, False)


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("so it is\n3 / 4", True),
        ("\\boxed{3/4} or \\boxed{3  /  4}", True),
        ("#### 3 / 4\nDone.", True),
        ("3 / 4\n5", False),
        ("\\boxed{5}\n3 / 4", False),
        ("#### 5\n#### 3 / 4", True),
        ("", False),
        ("13 / 4", False),
    ],
)
def test_exact_verifier(response, correct):
    assert get_verifier("exact")(response, "3 / 4") is correct


RIGHT = [
    # where the answer is
    (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{5}, no: \boxed{\sqrt{\frac{a}{b}}}", r"\sqrt{\frac{a}{b}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{a} and then \boxed{b", "a"),
    (r"\boxed {7}", "7"),
    (r"\fbox{7}", "7"),
    ("#### 42\n\\boxed{7}", "7"),
    ("The answer is 5.\n#### 42\nDone.", "42"),
    ("I think the answer is 5.\n7", "7"),
    ("The answer is 42.", "42"),
    ("So the final answer is: 42", "42"),
    ("Answer: 42", "42"),
    ("**Answer:** 42", "42"),
    ("**Answer: 42**", "42"),
    ("**The answer is 42.**", "42"),
    ("The answer is **42**.", "42"),
    ("x = 3\n\n", "x = 3"),
    # how it is written
    ("**42**", "42"),
    ("`42`", "42"),
    ("*42*", "42"),
    ("$42$", "42"),
    ("$$ 42 $$", "42"),
    (r"\(42\)", "42"),
    (r"\[42\].", "42"),
    (r"\boxed{\text{Paris}}", "Paris"),
    (r"$\boxed{42}$.", "42"),
    ("1,000", "1000"),
    ("1000", "1,000"),
    ("-1,234,567.5", "-1234567.5"),
    (r"\boxed{1{,}234}", "1234"),
    ("+5", "5"),
    ("3  /\t4", "3 / 4"),
    # an answer column that holds a solution
    ("#### 72", "48 + 24 = 72\n#### 72"),
    ("72", r"It is \boxed{72}."),
]
WRONG = [
    ("142", "42"),
    ("42", "142"),
    ("1,00", "100"),
    ("10,00", "1000"),
    ("1,0000", "10000"),
    ("1,000,00", "100000"),
    ("0.1,000", "0.1000"),
    ("-42", "42"),
    ("- 42", "-42"),
    ("3.14", "3"),
    ("3", "3.14"),
    ("42.5", "42"),
    ("42%", "42"),
    ("4 2", "42"),
    ("x_1", "x1"),
    ("2*3*4", "234"),
    ("a*b", "ab"),
    ("$5", "5"),
    ("(1,234)", "(1234)"),
    ("1,234 apples", "1234"),
    (r"\frac{1}{2}", "0.5"),
    ("1/2", "0.5"),
    (r"\boxed{42", "42"),
    (r"\boxed{}", ""),
    ("The answer is 42 or 43.", "42"),
    ("The answer is not 42", "42"),
    ("The answer is 42.\nDone.", "42"),
    ("The answer is 5.\n7", "5"),
    ("Answer", "42"),
    ("", ""),
    (".", ""),
    ("**", "**42**"),
]


@pytest.mark.parametrize(("response", "answer"), RIGHT)
def test_the_documented_ways_to_write_an_answer_are_right(response, answer):
    assert get_verifier("exact")(response, answer)


@pytest.mark.parametrize(("response", "answer"), WRONG)
def test_what_only_looks_like_the_answer_is_wrong(response, answer):
    assert not get_verifier("exact")(response, answer)


@pytest.mark.parametrize("part", ["\\boxed{", "}", "{", "#", "####", "*", "$", "`", "1,", ",123"])
@pytest.mark.parametrize("tail", ["", "}" * 10_000, "\n42"])
def test_hostile_responses_of_a_hundred_kilobytes_are_read_once(part, tail, monkeypatch):
    """It ends: a quadratic rule would look at 10^10 characters and run into the time limit."""
    from megatron_opd.data.tasks import answers

    rounds = []
    unwrapped = answers._unwrapped
    monkeypatch.setattr(
        answers, "_unwrapped", lambda text: (rounds.append(len(text)), unwrapped(text))[1]
    )
    text = part * (100_000 // len(part)) + tail
    assert get_verifier("exact")(text, "42") is (tail == "\n42")
    assert sum(rounds) <= 2 * answers._MAX_WRAPPERS * len(text)


def test_an_unknown_task_lists_the_choices():
    with pytest.raises(
        ValueError,
        match="unknown task 'algebra'; choices: arithmetic, code, exact, json_schema, math, multip",
    ):
        get_task("algebra")


def test_a_task_without_verifier_is_refused_where_one_is_needed():
    assert TASKS["none"].verify is None
    with pytest.raises(ValueError, match="'none' has no verifier"):
        get_verifier("none")
