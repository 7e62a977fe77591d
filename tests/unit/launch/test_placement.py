"""Where every process of a run goes, for random parts on random nodes."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.launch.parts import LEARNER, GpuPart, gpus_needed, learner_part, server_parts
from megatron_opd.launch.placement import UNPLACED, Placement, gpu_text, place, place_server
from tests.support.config_files import minimal


def node(count: int) -> tuple[str, ...]:
    return tuple(f"gpu{index}" for index in range(count))


def part(key: str, groups: int, size: int, gpus: tuple[int, ...] | None = None) -> GpuPart:
    return GpuPart(key, groups, size, f"{groups} x tp {size}", gpus)


def shapes(most: int) -> st.SearchStrategy[list[GpuPart]]:
    """The learner and up to three roles; no list yet."""
    server = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 8]))
    roles = st.lists(server, min_size=1, max_size=most)
    learner = st.sampled_from([1, 2, 3, 4, 6, 8])
    return st.builds(
        lambda ranks, found: [
            part(LEARNER, 1, ranks),
            *(part(f"role{i}", groups, size) for i, (groups, size) in enumerate(found)),
        ],
        learner,
        roles,
    )


@st.composite
def with_lists(draw: st.DrawFn) -> tuple[list[GpuPart], int]:
    """Parts, some of which name their GPUs, and a node on which all of it fits."""
    parts = draw(shapes(3))
    total = sum(each.total for each in parts) + draw(st.integers(0, 5))
    order = list(draw(st.permutations(range(total))))
    found = []
    for each in parts:
        named = draw(st.booleans())
        taken, order = (order[: each.total], order[each.total :]) if named else (None, order)
        gpus = None if taken is None else tuple(taken)
        found.append(GpuPart(each.key, each.groups, each.size, each.count, gpus))
    return found, total


def uses(placement: Placement) -> Counter[int]:
    groups = [group for part in placement.groups.values() for group in part]
    return Counter(gpu for group in groups for gpu in group)


def check_complete(parts: list[GpuPart], placement: Placement, num_gpus: int) -> None:
    """Every part has its number of groups of its size, of GPUs that exist and differ."""
    assert list(placement.groups) == [each.key for each in parts]
    for each in parts:
        groups = placement.groups[each.key]
        assert [len(group) for group in groups] == [each.size] * each.groups
        for group in groups:
            assert len(set(group)) == len(group)
            assert all(0 <= gpu < num_gpus for gpu in group)
        if each.gpus is not None:
            assert tuple(gpu for group in groups for gpu in group) == each.gpus


@given(with_lists())
def test_no_gpu_is_used_twice_and_lists_are_kept(drawn: tuple[list[GpuPart], int]):
    parts, num_gpus = drawn
    placement = place(parts, node(num_gpus))
    check_complete(parts, placement, num_gpus)
    assert max(uses(placement).values()) == 1
    assert placement.shared(*placement.groups) is None


@given(shapes(3), st.integers(0, 5))
def test_groups_are_neighbours_and_in_order(parts: list[GpuPart], spare: int):
    """Without lists they fit exactly into as many GPUs as they need."""
    needed = gpus_needed(parts)
    assert needed == sum(each.total for each in parts)
    placement = place(parts, node(needed + spare))
    check_complete(parts, placement, needed + spare)
    for groups in placement.groups.values():
        for group in groups:
            assert group == tuple(range(group[0], group[0] + len(group)))
        assert list(groups) == sorted(groups)
    assert placement.groups[LEARNER][0][0] == 0


@given(shapes(3))
def test_with_room_no_group_crosses_a_block(parts: list[GpuPart]):
    placement = place(parts, node(8 * (2 + 12)))
    for groups in placement.groups.values():
        for group in groups:
            block = next(b for b in (1, 2, 4, 8) if b >= len(group))
            assert group[0] // block == group[-1] // block


@given(with_lists(), st.integers(1, 20))
def test_too_few_gpus_are_refused_unless_shared(drawn: tuple[list[GpuPart], int], num_gpus: int):
    parts, _ = drawn
    parts = [each for each in parts if all(gpu < num_gpus for gpu in each.gpus or ())]
    if not parts:
        return
    fits = gpus_needed(parts) <= num_gpus
    if fits:
        assert max(uses(place(parts, node(num_gpus))).values()) == 1
    else:
        with pytest.raises(ValueError, match=rf"need {gpus_needed(parts)} GPUs .* {num_gpus}: "):
            place(parts, node(num_gpus))
    if max(each.size for each in parts) > num_gpus:
        with pytest.raises(ValueError, match="ranks of one group never share a GPU"):
            place(parts, node(num_gpus), share=True)
        return
    shared = place(parts, node(num_gpus), share=True)
    check_complete(parts, shared, num_gpus)
    if fits:
        assert shared == place(parts, node(num_gpus)), "what fits is laid out as without sharing"
    else:
        assert shared.shared(*shared.groups) is not None


@given(st.integers(1, 9), st.integers(1, 12))
def test_wrapped_around_no_gpu_has_two_more_than_another(num_gpus: int, servers: int):
    parts = [part(LEARNER, 1, 1), part("student", servers, 1)]
    counts = uses(place(parts, node(num_gpus), share=True))
    found = [counts[gpu] for gpu in range(num_gpus)]
    assert max(found) - min(found) <= 1
    assert sum(found) == 1 + servers


def test_lists_may_overlap_where_sharing_is_allowed():
    parts = [part(LEARNER, 1, 2, (0, 1)), part("student", 1, 2, (1, 0)), part("teacher", 1, 1)]
    placement = place(parts, node(2), share=True)
    assert placement.of("student") == (1, 0)
    assert placement.of("teacher") == (0,)
    assert placement.shared(LEARNER, "student") == 0
    assert placement.shared("teacher") is None


def test_a_list_may_leave_gaps_in_the_smallest_node():
    assert gpus_needed([part(LEARNER, 1, 1), part("student", 1, 1, (5,))]) == 6
    assert gpus_needed([part(LEARNER, 1, 8), part("student", 1, 1, (5,))]) == 9


def test_a_cut_group_is_better_than_no_run():
    parts = [part(LEARNER, 1, 2), part("student", 1, 1, (1,))]
    assert place(parts, node(3)).of(LEARNER) == (0, 2)


def test_a_node_without_gpus_gives_none():
    placement = place([part(LEARNER, 1, 2), part("student", 2, 1)], ())
    assert placement is UNPLACED
    assert placement.of(LEARNER) is placement.visible("student", 1) is None


@pytest.mark.parametrize(
    ("parts", "num_gpus", "words"),
    [
        (
            [part(LEARNER, 1, 2), part("student", 5, 1), part("teacher", 2, 4)],
            8,
            "the parts of the run need 15 GPUs and this process may use 8: learner 2 (1 x tp 2), "
            "student 5 (5 x tp 1), teacher 8 (2 x tp 4); lower these counts, start servers "
            "elsewhere (urls), or set cluster.share_gpus: true",
        ),
        (
            [part("student", 1, 2, (7, 8))],
            8,
            "student.gpus must be of 0..7, the 8 GPUs that this process may use on this node, got "
            "8; name others, or see CUDA_VISIBLE_DEVICES",
        ),
        (
            [part(LEARNER, 1, 1, (0,))],
            0,
            "learner.gpus must be null on a node without a GPU that this process may use, got "
            "[0]; leave it out to run on the CPU, or see CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_refusals_name_everything(parts: list[GpuPart], num_gpus: int, words: str):
    with pytest.raises(ValueError, match="GPU") as refused:
        place(parts, node(num_gpus))
    assert str(refused.value) == words


def test_the_learners_list_has_a_gpu_for_each_rank():
    def learner(**keys: Any) -> LearnerConfig:
        return LearnerConfig.model_validate({"parallel": {"tp": 2, "dp": 2}} | keys)

    assert learner_part(learner(gpus=[3, 2, 1, 0])).named == ((3, 2, 1, 0),)
    with pytest.raises(ValueError, match=r"learner\.gpus must name a GPU for each of the 4 ranks"):
        learner_part(learner(gpus=[0, 1]))


def test_servers_elsewhere_need_none():
    config = minimal(student={"model": "s", "urls": ["http://127.0.0.1:1"]})
    sections = {"student": config.student, "teacher": config.teacher}
    assert [each.key for each in server_parts(sections)] == ["teacher"]


def test_what_cuda_calls_them():
    placement = place([part(LEARNER, 1, 2), part("student", 2, 1)], ("4", "GPU-a", "6", "7"))
    assert placement.visible(LEARNER) == ("4", "GPU-a")
    assert placement.visible("student", 1) == ("7",)
    assert placement.line == "learner 0-1, student 2 3"
    assert gpu_text((0, 2, 3)) == "0,2,3"


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(4, 9))
def test_a_server_started_alone_takes_its_block(size: int, index: int, num_gpus: int):
    found = place_server(part("student", 2, size), index, node(num_gpus))
    blocks = num_gpus // size
    assert found == node(num_gpus)[index % blocks * size : (index % blocks + 1) * size]


def test_a_server_started_alone_keeps_what_its_section_names():
    student = part("student", 2, 2, (5, 4, 1, 0))
    assert place_server(student, 1, node(8)) == ("gpu1", "gpu0")
    assert place_server(part("student", 2, 2), 1, ()) is None
    with pytest.raises(ValueError, match=r"student\.gpus names the GPUs of 2 servers .* --index 2"):
        place_server(student, 2, node(8))
    with pytest.raises(ValueError, match=r"student\.tp must fit on this node"):
        place_server(part("student", 1, 2), 0, node(1))


TURNS = (LEARNER, "student")


def test_parts_that_work_in_turn_get_the_same_gpus():
    """Both take what the teacher leaves; neither part shares a GPU with itself or the teacher."""
    parts = [part(LEARNER, 1, 4), part("student", 2, 2), part("teacher", 1, 4)]
    placement = place(parts, node(8), in_turn=TURNS)
    assert placement.groups == {
        LEARNER: ((0, 1, 2, 3),),
        "student": ((0, 1), (2, 3)),
        "teacher": ((4, 5, 6, 7),),
    }
    assert gpus_needed(parts, TURNS) == 8
    assert gpus_needed(parts) == 12
    with pytest.raises(ValueError, match=r"need 8 GPUs and this process may use 7: "):
        place(parts, node(7), in_turn=TURNS)
    with pytest.raises(ValueError, match=r"need 12 GPUs"):
        place(parts, node(8))


def test_named_gpus_of_parts_that_work_in_turn():
    parts = [part(LEARNER, 1, 2), part("student", 2, 1, (3, 2)), part("teacher", 1, 1, (0,))]
    placement = place(parts, node(4), in_turn=TURNS)
    assert placement.groups == {LEARNER: ((2, 3),), "student": ((3,), (2,)), "teacher": ((0,),)}
    assert placement.shared(LEARNER, "student") == 2
    assert placement.shared("student", "teacher") is None


@given(shapes(3), st.integers(1, 40))
@settings(deadline=None)
def test_turns_take_what_the_others_leave(parts: list[GpuPart], num_gpus: int):
    turns = (LEARNER, "role0")
    if gpus_needed(parts, turns) > num_gpus:
        with pytest.raises(ValueError, match="need"):
            place(parts, node(num_gpus), in_turn=turns)
        return
    placement = place(parts, node(num_gpus), in_turn=turns)
    check_complete(parts, placement, num_gpus)
    for left_out in turns:
        shown = {key: groups for key, groups in placement.groups.items() if key != left_out}
        assert max(uses(Placement(placement.names, shown)).values()) == 1
