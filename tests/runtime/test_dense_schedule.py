"""The dense schedule without a device: its text, its order beside the experts', and recovery from any abort.

Mutation-checked once, each caught by a test below: no fill at H2; no fill at H3; a fill that ignores an open window;
a slot claimed before its copy is whole; `open` cleared behind the last fill; H0 without its barrier, or without
forgetting the slots; a start that primes after an abort; a fill that does not stop at the forward's end standalone.
"""

import itertools
import random

import pytest

from dwdp.runtime.dense_schedule import (
    Barrier,
    Demand,
    DenseSchedule,
    EndRead,
    Fence,
    Gather,
    WaitReady,
)
from dwdp.runtime.schedule import Issue, PrefetchSchedule, Restart, Synchronise

WORDS = {
    Gather: "L({n})",
    WaitReady: "wait {slots}",
    EndRead: "end {a.slot}",
    Demand: "demand L({n})",
    Fence: "fence",
    Barrier: "barrier",
    Issue: "E({n})",
    Restart: "restart",
    Synchronise: "synchronise",
}


def text(actions, only=None):
    """Actions as in the README's figure; layers count from 1 there, as Kimi-K3's MoE layers do."""
    shown = []
    for action in actions:
        n = getattr(action, "pos", getattr(action, "layer", -1)) + 1
        if type(action) in WORDS and (only is None or type(action) in only):
            shown.append(WORDS[type(action)].format(n=n, a=action, slots=" ".join(getattr(action, "slots", ()))))
    return " ".join(shown)


class Driver:
    """Calls both schedules as executor and model do: the dense ones in the open, the experts' between h2 and h3."""

    def __init__(self, num_layers, *, segments="AD", expert_slots=2, attached=True):
        self.dense = DenseSchedule([segments] * num_layers, prefetch_next_pass=attached)
        self.experts = PrefetchSchedule(num_layers, expert_slots) if attached else None
        self.log = []  # (hook, action)

    def run(self, hook, actions):
        for action in actions or ():
            self.log.append((hook, action))

    def start(self):
        if self.dense.needs_recovery:
            return
        self.run("start", self.dense.start_forward())
        if self.experts:
            self.run("start", self.experts.start_forward())

    def h0(self):
        self.run("H0", self.dense.h0())
        if self.experts:
            self.run("H0", self.experts.start_forward())

    def layer(self, pos):
        """The steps of a layer, so that a test can stop between them."""
        yield from (
            lambda: self.run(f"H1({pos + 1})", self.dense.h1(pos)),
            lambda: self.run(f"H2({pos + 1})", self.dense.h2(pos)),
        )
        if self.experts:
            yield lambda: self.run(f"bind({pos + 1})", self.experts.bind(pos))
            yield lambda: self.run(f"finish({pos + 1})", self.experts.finish(pos))
        yield lambda: self.run(f"H3({pos + 1})", self.dense.h3(pos))

    def steps(self):
        yield self.h0
        for pos in range(self.dense.num_layers):
            yield from self.layer(pos)

    def forward(self, *, start=True, steps=None):
        """One forward, or its first `steps` steps."""
        begin = len(self.log)
        if start:
            self.start()
        for step in itertools.islice(self.steps(), steps):
            step()
        return self.log[begin:]

    def counts(self):
        return {kind: sum(isinstance(a, kind) for _, a in self.log) for kind in (Demand, Fence, Barrier)}


def lines(log):
    shown = [(hook, text(a for _, a in group)) for hook, group in itertools.groupby(log, key=lambda item: item[0])]
    return "\n".join(f"{hook:<10} {actions}".rstrip() for hook, actions in shown if actions)


def copies(log):
    return text((action for _, action in log), only=(Gather, Issue))


def test_two_forwards_of_four_layers_read_like_the_figure():
    driver = Driver(4)
    driver.forward()
    assert (
        lines(driver.log)
        == """\
start      L(1) L(2) E(1) E(2)
H1(1)      wait A0 D0
H2(1)      end A0 L(3)
finish(1)  E(3)
H3(1)      end D0
H1(2)      wait A1 D1
H2(2)      end A1 L(4)
finish(2)  E(4)
H3(2)      end D1
H1(3)      wait A0 D2
H2(3)      end A0
finish(3)  E(1)
H3(3)      end D2
H1(4)      wait A1 D0
H2(4)      end A1
finish(4)  E(2)
H3(4)      end D0 L(1) L(2)"""
    )
    second = driver.forward()
    assert lines(second).splitlines()[0] == "H1(1)      wait A0 D0", "a primed forward starts with nothing to do"
    assert not any(driver.counts().values())


@pytest.mark.parametrize(
    ("remainder", "order"),
    [
        (0, "L(1) E(1) L(2) E(2)"),
        (1, "E(1) E(2) L(1) L(2)"),
        (2, "E(1) L(1) E(2) L(2)"),
        (3, "L(1) L(2) E(1) E(2)"),
        (4, "E(1) E(2) L(1) L(2)"),
        (5, "L(1) E(1) E(2) L(2)"),
    ],
)
def test_the_order_at_the_boundary_depends_on_L_mod_6(remainder, order):
    for num_layers in (remainder, remainder + 6, remainder + 12):
        if num_layers < 2:
            continue
        driver = Driver(num_layers)
        driver.forward()
        driver.forward()
        before = driver.log.index(("H1(1)", WaitReady(0, ("A0", "D0"))))
        first = driver.log[before:]
        # of the first forward: copies of layers 1 and 2 after their own reads belong to the next forward
        nexts = [
            a for _, a in first if isinstance(a, (Gather, Issue)) and getattr(a, "pos", getattr(a, "layer", 0)) < 2
        ]
        assert text(nexts[:4]) == order, num_layers


def test_one_layer_primes_itself_again():
    driver = Driver(1)
    driver.forward()
    assert copies(driver.log) == "L(1) E(1) E(1) L(1)"
    assert driver.dense.primed


def test_kimi_k3_boundary_is_E1_L1_E2_L2_and_attention_alone_is_L1_E1_L2_E2():
    last = {}
    for segments in ("AD", "A"):
        driver = Driver(92, segments=segments)
        driver.forward()
        at = [i for i, (hook, _) in enumerate(driver.log) if hook == "H1(91)"][0]
        last[segments] = lines([item for item in driver.log[at:] if isinstance(item[1], (Gather, Issue))])
    assert (
        last["AD"]
        == """\
finish(91) E(1)
H3(91)     L(1)
finish(92) E(2)
H3(92)     L(2)"""
    )
    assert (
        last["A"]
        == """\
H2(91)     L(1)
finish(91) E(1)
H2(92)     L(2)
finish(92) E(2)"""
    )


def test_within_a_forward_each_dense_copy_is_right_before_its_expert_copy():
    driver = Driver(92)
    driver.forward()
    assert " E(40) L(41) E(41) L(42) E(42) " in copies(driver.log)


def test_with_more_expert_slots_the_expert_copy_runs_ahead():
    driver = Driver(92, expert_slots=3)
    driver.forward()
    assert " L(41) E(42) L(42) E(43) " in copies(driver.log)


def test_standalone_keeps_one_schedule_per_forward():
    driver = Driver(5, attached=False)
    for _ in range(2):
        log = driver.forward()
        assert (
            lines([item for item in log if isinstance(item[1], Gather)])
            == """\
start      L(1) L(2)
H2(1)      L(3)
H2(2)      L(4)
H2(3)      L(5)"""
        )
    assert not any(driver.counts().values())


@pytest.mark.parametrize("segments", ["AD", "A", "D"])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6, 7, 92])
@pytest.mark.parametrize("attached", [True, False])
def test_a_clean_run_has_no_fence_demand_or_barrier_and_leaves_the_next_forward_primed(num_layers, segments, attached):
    driver = Driver(num_layers, segments=segments, attached=attached)
    for number in range(4):
        log = driver.forward(start=number != 1)
        gathered = [a.pos for _, a in log if isinstance(a, Gather)]
        assert driver.dense.primed is attached
        if number:
            assert sorted(gathered) == list(range(num_layers)), "every layer is gathered once a forward"
    assert not any(driver.counts().values())


def test_layers_without_a_segment_still_count_in_pos():
    schedule = DenseSchedule(["AD", "A", "D", "AD"], prefetch_next_pass=True)
    assert [schedule.slots_of(pos) for pos in range(4)] == [("A0", "D0"), ("A1",), ("D2",), ("A1", "D0")]
    for _ in range(3):
        actions = [*schedule.h0()]
        for pos in range(4):
            actions += [*schedule.h1(pos), *schedule.h2(pos), *schedule.h3(pos)]
        assert not any(isinstance(a, (Demand, Fence, Barrier)) for a in actions)


# ---- aborts ----


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 8])
def test_after_an_abort_anywhere_h0_goes_behind_a_barrier_and_primes_in_order(num_layers, started):
    total = len([*Driver(num_layers).steps()])
    for steps in range(1, total):
        driver = Driver(num_layers)
        driver.forward()
        driver.forward(steps=steps)
        log = driver.forward(start=started)
        first = lines(log).splitlines()[0]
        dense = " ".join(["barrier", "L(1)", "L(2)"][: 1 + min(2, num_layers)])
        assert first.startswith(f"H0         {dense}"), (steps, first)
        counts = driver.counts()
        assert counts == {Demand: 0, Fence: 0, Barrier: 1}, (steps, counts)
        before_bind = steps <= 3
        after_finish = steps >= total - 1
        experts = first.removeprefix(f"H0         {dense}").split()
        if before_bind or after_finish:
            assert experts == [], (steps, first)
        else:
            bound = (steps - 1) % 5 == 3
            issued = ["E(1)", "E(2)"][: min(2, num_layers)]
            assert experts == ["synchronise"] * bound + ["restart"] + issued, (steps, first)


class Stopped(Exception):
    pass


def gathers_until(actions, number):
    """Runs actions and fails instead of carrying out the `number`-th Gather."""
    for action in actions:
        if isinstance(action, Gather):
            number -= 1
            if number < 0:
                raise Stopped


@pytest.mark.parametrize("failing", [0, 1])
def test_an_abort_inside_the_last_fill_is_completed_by_the_start_without_a_barrier(failing):
    driver = Driver(4)
    driver.forward(steps=len([*driver.steps()]) - 1)
    with pytest.raises(Stopped):
        gathers_until(driver.dense.h3(3), failing)
    assert text(driver.dense.start_forward()) == ["L(1) L(2)", "L(2)"][failing]
    assert copies(driver.forward(start=False)).startswith("L(3)")
    assert driver.counts()[Barrier] == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_an_abort_inside_a_start_is_completed_by_the_next_start(failing):
    schedule = DenseSchedule(["AD"] * 4, prefetch_next_pass=True)
    with pytest.raises(Stopped):
        gathers_until(schedule.start_forward(), failing)
    assert text(schedule.start_forward()) == ["L(1) L(2)", "L(2)"][failing]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_abort_inside_the_priming_of_h0_leaves_the_forward_open(failing):
    schedule = DenseSchedule(["AD"] * 4, prefetch_next_pass=True)
    with pytest.raises(Stopped):
        gathers_until(schedule.h0(), failing)
    assert schedule.open and not [*schedule.start_forward()]
    assert text(schedule.h0()) == "barrier L(1) L(2)"


def test_a_slot_holds_nothing_while_its_copy_is_not_whole():
    schedule = DenseSchedule(["AD"] * 4, prefetch_next_pass=True)
    actions = schedule.start_forward()
    next(actions)  # L(1) is being carried out
    assert schedule.slots["A0"].holder is None and schedule.ahead == 0
    next(actions)  # and was carried out
    assert schedule.slots["A0"].holder == 0 and schedule.ahead == 1


def test_a_start_whose_forward_never_reached_the_model_leaves_nothing_open():
    driver = Driver(4)
    driver.start()
    driver.start()
    driver.forward()
    assert copies(driver.log).startswith("L(1) L(2) E(1) E(2) L(3)")
    assert not any(driver.counts().values())


def test_a_layer_that_is_not_expected_is_fetched_on_demand_behind_a_fence():
    schedule = DenseSchedule(["AD"] * 6, prefetch_next_pass=True)
    for actions in (schedule.h0(), schedule.h1(0)):
        list(actions)
    assert text(schedule.h1(3)) == "demand L(4) fence L(4) wait A1 D0"
    assert text(schedule.h2(3)) == "end A1 L(5) L(6)", "the fill goes on from the layer that was asked for"


def test_without_h0_the_first_layer_is_a_demand_fetch_without_a_fence():
    schedule = DenseSchedule(["AD"] * 3, prefetch_next_pass=True)
    assert text(schedule.h1(0)) == "demand L(1) L(1) wait A0 D0"


def test_a_copy_into_a_slot_with_an_open_window_takes_the_fence():
    class Eager(DenseSchedule):
        def h1(self, pos):
            yield from super().h1(pos)
            yield from self._gather((pos + 2) % self.num_layers)

    schedule = Eager(["AD"] * 6, prefetch_next_pass=True)
    actions = [*schedule.h0(), *schedule.h1(0)]
    assert text(actions) == "L(1) L(2) wait A0 D0 fence L(3)"


def test_no_fill_at_h2_becomes_demand_fetches():
    class Lazy(DenseSchedule):
        def h2(self, pos):
            yield from self._close("A", pos)

        def h3(self, pos):
            yield from self._close("D", pos)

    schedule = Lazy(["AD"] * 6, prefetch_next_pass=True)
    actions = [*schedule.h0()]
    for pos in range(6):
        actions += [*schedule.h1(pos), *schedule.h2(pos), *schedule.h3(pos)]
    assert text(a for a in actions if isinstance(a, Demand)) == " ".join(f"demand L({n})" for n in range(3, 7))


def test_random_sequences_of_aborts_and_failed_starts_never_read_a_slot_that_lacks_its_layer():
    """What a slot holds is followed here by itself: a copy fills it, a reader must find its layer."""
    rng = random.Random(20)
    for _ in range(300):
        num_layers, attached = rng.randint(1, 9), rng.random() < 0.7
        driver = Driver(
            num_layers, segments=rng.choice(["AD", "A"]), expert_slots=rng.choice([2, 3, 4]), attached=attached
        )
        for _ in range(5):
            if rng.random() < 0.3:
                driver.start()
            whole = rng.random() < 0.4
            total = len([*driver.steps()])
            driver.forward(start=rng.random() < 0.6, steps=None if whole else rng.randrange(total))
            if driver.experts and rng.random() < 0.2:
                driver.run("invalidate", driver.experts.invalidate())
        driver.forward()
        held, reading = {}, {}
        for _, action in driver.log:
            if isinstance(action, Gather):
                for slot in action.slots:
                    assert slot not in reading, "a copy into a slot that is read"
                    held[slot] = action.pos
            elif isinstance(action, WaitReady):
                for slot in action.slots:
                    assert held[slot] == action.pos
                    reading[slot] = action.pos
            elif isinstance(action, EndRead):
                assert reading.pop(action.slot) == action.pos
            elif isinstance(action, (Barrier, Fence)):
                reading.clear()
        counts = driver.counts()
        assert counts[Demand] == 0 and counts[Fence] == 0


def test_refused_segments():
    with pytest.raises(ValueError, match="segments"):
        DenseSchedule(["AD", ""], prefetch_next_pass=True)
