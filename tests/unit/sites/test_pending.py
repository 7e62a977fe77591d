"""Whatever happens to sites: a prompt is with one or waits; nobody holds more than its slots."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.sites.pending import PendingPrompts
from tests.support.fakes import make_prompt

SITES = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "answer", "join", "again", "lose", "leave", "pause", "resume")),
        st.integers(0, 30),
    ),
    max_size=80,
)


class World:
    """What sites hold, by what they were sent; `answered` prompts leave them."""

    def __init__(self, size: int) -> None:
        self.pending, self.size, self.uid = PendingPrompts(size), size, 0
        self.slots = {"a": 2, "b": 3, "c": 1}
        self.held: dict[str, set[int]] = {}
        self.asked: set[int] = set()

    def take(self, assignments) -> None:
        for each in assignments:
            held = self.held[each.site]
            assert each.prompt.uid in self.asked
            assert each.prompt.uid not in held
            held.add(each.prompt.uid)
            assert len(held) <= self.slots[each.site]

    def step(self, what: str, number: int) -> None:
        site, pending = SITES[number % 3], self.pending
        if what == "ask":
            self.asked.add(self.uid)
            self.uid += 1
            self.take(pending.ask(make_prompt(self.uid - 1)))
        elif what == "answer" and self.held.get(site):
            self.answer(site, sorted(self.held[site])[number % len(self.held[site])])
        elif what == "join":
            self.held[site] = set()
            self.take(pending.join(site, self.slots[site], []))
        elif what == "again" and site in self.held:
            kept = {uid for uid in self.held[site] if uid % 2 == number % 2}
            self.held[site] = kept
            self.take(pending.join(site, self.slots[site], sorted(kept)))
        elif what == "lose":
            self.take(pending.lose(site, for_good=False))
        elif what == "leave":
            self.held.pop(site, None)
            self.take(pending.lose(site, for_good=True))
        elif what == "pause":
            pending.pause(site)
        elif what == "resume":
            self.take(pending.resume(site))

    def answer(self, site: str, uid: int) -> None:
        assert self.pending.has(site, uid)
        holders = self.pending.remove(uid)
        assert sorted(holders) == sorted(name for name, held in self.held.items() if uid in held)
        for held in self.held.values():
            held.discard(uid)
        self.asked.discard(uid)
        self.take(self.pending.fill())

    def check(self) -> None:
        there = set().union(*self.held.values()) if self.held else set()
        for uid in self.asked:
            assert uid in self.pending
        assert self.pending.waiting >= len(self.asked - there)
        for site, held in self.held.items():
            assert self.pending.count(site) == len(held)


@settings(max_examples=200)
@given(STEPS, st.sampled_from((1, 2, 3)))
def test_nothing_is_lost_and_nobody_holds_too_much(steps, size):
    world = World(size)
    for what, number in steps:
        world.step(what, number)
        world.check()
    for site in SITES:  # in the end all of it is answered
        if site not in world.held:
            world.step("join", SITES.index(site))
        world.take(world.pending.resume(site))
    while world.asked:
        site = next(name for name, held in world.held.items() if held)
        world.answer(site, min(world.held[site]))
    assert world.pending.waiting == 0


def test_a_group_that_waits_for_slots_stays_with_its_site():
    pending = PendingPrompts(4)
    pending.join("a", 2, [])
    pending.join("b", 2, [])
    given = [each for uid in range(4) for each in pending.ask(make_prompt(uid))]
    (site,) = {each.site for each in given}
    assert [each.prompt.uid for each in given] == [0, 1]
    pending.remove(0)
    assert [(each.site, each.prompt.uid) for each in pending.fill()] == [(site, 2)]


def test_a_site_that_is_back_is_not_given_what_it_has():
    pending = PendingPrompts(1)
    pending.join("a", 2, [])
    pending.ask(make_prompt(0))
    pending.lose("a", for_good=False)
    assert pending.waiting == 1
    assert pending.resume("a") == []
    assert pending.waiting == 0
    assert pending.has("a", 0)


def test_lost_prompts_come_before_those_that_wait():
    pending = PendingPrompts(1)
    pending.join("a", 1, [])
    for uid in range(3):
        pending.ask(make_prompt(uid))
    pending.lose("a", for_good=True)
    assert [each.prompt.uid for each in pending.join("b", 1, [])] == [0]
