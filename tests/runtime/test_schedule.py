"""The expert schedule, without a device: its text, its order for every L and S, and recovery from any abort.

Mutation-checked once, each caught by a test below: `_fill` that ignores `free`; `finish` that does not mark
the slot as read; a claim before the yield in `_fill`; no Synchronise in `_restart`; `invalidate` that forgets
the bound mark; `_next_bind` left behind by a restart.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dwdp.runtime.schedule import (
    Demand,
    Issue,
    PrefetchSchedule,
    Record,
    Restart,
    Synchronise,
    Wait,
)


def text(actions):
    words = {
        Issue: "E({0.layer})",
        Wait: "wait E({0.layer})",
        Record: "free slot {0.slot}",
        Synchronise: "synchronise",
        Restart: "restart at {0.layer}",
        Demand: "demand E({0.layer})",
    }
    return ", ".join(words[type(action)].format(action) for action in actions)


def trace(schedule, script):
    lines = []
    for step in script:
        name, *args = step.replace("(", " ").replace(")", "").split()
        method = {"start": "start_forward"}.get(name, name)
        actions = getattr(schedule, method)(*map(int, args))
        lines.append(f"{step:<10} {text(actions) if actions is not None else ''}".rstrip())
    return "\n".join(lines)


def forward(num_layers, start=True):
    steps = [f"{hook}({layer})" for layer in range(num_layers) for hook in ("bind", "finish")]
    return ["start", *steps] if start else steps


def test_two_forwards_read_like_the_figure():
    assert (
        trace(PrefetchSchedule(4, 2), forward(4) * 2)
        == """\
start      E(0), E(1)
bind(0)    wait E(0)
finish(0)  free slot 0, E(2)
bind(1)    wait E(1)
finish(1)  free slot 1, E(3)
bind(2)    wait E(2)
finish(2)  free slot 0, E(0)
bind(3)    wait E(3)
finish(3)  free slot 1, E(1)
start
bind(0)    wait E(0)
finish(0)  free slot 0, E(2)
bind(1)    wait E(1)
finish(1)  free slot 1, E(3)
bind(2)    wait E(2)
finish(2)  free slot 0, E(0)
bind(3)    wait E(3)
finish(3)  free slot 1, E(1)"""
    )


def test_one_finish_issues_several_when_slots_do_not_divide_layers():
    assert (
        trace(PrefetchSchedule(5, 3), forward(5))
        == """\
start      E(0), E(1), E(2)
bind(0)    wait E(0)
finish(0)  free slot 0, E(3)
bind(1)    wait E(1)
finish(1)  free slot 1, E(4)
bind(2)    wait E(2)
finish(2)  free slot 2
bind(3)    wait E(3)
finish(3)  free slot 0, E(0)
bind(4)    wait E(4)
finish(4)  free slot 1, E(1), E(2)"""
    )


def test_aborts_and_invalidation_read_as_specified():
    script = ["start", "bind(0)", "finish(0)"]  # aborted before bind(1): nothing is bound
    script += ["start", "bind(0)"]  # aborted between bind and finish
    script += ["invalidate", "start", *forward(4, start=False), "invalidate", "start", "bind(0)", "finish(0)"]
    script += ["bind(3)", "bind(0)"]  # without a start: not expected, then while another is bound
    assert (
        trace(PrefetchSchedule(4, 2), script)
        == """\
start      E(0), E(1)
bind(0)    wait E(0)
finish(0)  free slot 0, E(2)
start      restart at 0, E(0), E(1)
bind(0)    wait E(0)
invalidate
start      synchronise, restart at 0, E(0), E(1)
bind(0)    wait E(0)
finish(0)  free slot 0, E(2)
bind(1)    wait E(1)
finish(1)  free slot 1, E(3)
bind(2)    wait E(2)
finish(2)  free slot 0, E(0)
bind(3)    wait E(3)
finish(3)  free slot 1, E(1)
invalidate
start      E(0), E(1)
bind(0)    wait E(0)
finish(0)  free slot 0, E(2)
bind(3)    demand E(3), restart at 3, E(3), E(0), wait E(3)
bind(0)    demand E(0), synchronise, restart at 0, E(0), E(1), wait E(0)"""
    )


def test_a_forward_without_a_start_fetches_its_first_layer_on_demand_once():
    assert text(PrefetchSchedule(3, 2).bind(0)) == "demand E(0), restart at 0, E(0), E(1), wait E(0)"


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 7, 8, 92])
def test_every_completed_forward_leaves_the_first_layers_issued(layers, slots):
    schedule = PrefetchSchedule(layers, slots)
    list(schedule.start_forward())
    assert schedule.in_flight and not schedule.primed  # issued by a start
    for _ in range(3):
        assert list(schedule.start_forward()) == [] or not schedule.in_flight
        issued = []
        for layer in range(layers):
            assert list(schedule.bind(layer)) == [Wait(layer, layer % schedule.num_slots)]
            actions = list(schedule.finish(layer))
            assert actions[0] == Record(layer, layer % schedule.num_slots)
            issued += [action.layer for action in actions[1:]]
            if layers % schedule.num_slots == 0:
                assert issued[-1] == (layer + schedule.num_slots) % layers and len(actions) == 2
        first = min(slots, layers)
        assert issued == [*range(first, layers), *range(first)]
        assert schedule.in_flight and schedule.primed


class Slots:
    """Judges a sequence of performed actions: what each slot holds and whether its window is open."""

    def __init__(self, schedule):
        self.schedule, self.content = schedule, {}
        self.open = None  # (layer, slot) between a performed wait and its record
        self.suspect = False  # an abort left the window of `open` without an end-of-read event

    def perform(self, action):
        match action:
            case Issue(layer, slot):
                assert slot == layer % self.schedule.num_slots
                assert self.open is None or self.open[1] != slot, "a copy into a slot whose window is open"
                assert not self.suspect, "a copy beside a read that nothing ends"
                self.content[slot] = layer
            case Wait(layer, slot):
                assert self.content.get(slot) == layer, "a read of a slot that holds another layer"
                self.open = (layer, slot)
            case Record(layer, slot):
                assert self.open == (layer, slot)
                self.open = None
            case Synchronise():
                self.open, self.suspect = None, False

    def run(self, actions, abort_at=None):
        """Performs the actions; the one at index `abort_at` fails before it has any effect. True: aborted."""
        for index, action in enumerate(actions):
            if index == abort_at:
                return True
            self.perform(action)
        return False


steps = st.lists(
    st.tuples(
        st.integers(0, 9),  # layers that the forward reaches
        st.sampled_from(["none", "before bind", "in bind", "after bind", "in finish"]),
        st.integers(0, 4),  # the action that fails
        st.booleans(),  # started by the executor
        st.sampled_from(["no", "no", "before", "after"]),  # invalidation
        st.sampled_from([None, None, 0, 1]),  # the start's action that fails
    ),
    max_size=8,
)


@settings(max_examples=300)
@given(layers=st.integers(1, 9), slots=st.integers(2, 4), forwards=steps)
def test_any_abort_is_recovered_and_no_open_slot_is_overwritten(layers, slots, forwards):
    schedule = PrefetchSchedule(layers, slots)
    judge = Slots(schedule)
    for reach, where, failing, started, invalidation, start_failing in forwards:
        if invalidation == "before":
            schedule.invalidate()
        if started and judge.run(schedule.start_forward(), start_failing):
            continue
        for layer in range(layers):
            aborts = layer == reach
            if aborts and where == "before bind":
                break
            if judge.run(schedule.bind(layer), failing if aborts and where == "in bind" else None):
                judge.suspect = schedule.bound is not None
                break
            if aborts and where == "after bind":
                judge.suspect = True
                break
            if judge.run(schedule.finish(layer), failing if aborts and where == "in finish" else None):
                judge.suspect = schedule.bound is not None
                break
        if invalidation == "after":
            schedule.invalidate()
            assert not schedule.in_flight
    judge.run(schedule.start_forward())
    for layer in range(layers):  # the next forward is right and clean
        bound = list(schedule.bind(layer))
        assert [type(action) for action in bound] == [Wait]
        judge.run(bound)
        judge.run(schedule.finish(layer))
    assert schedule.primed or layers == 0


@pytest.mark.parametrize("layers, slots", [(1, 2), (2, 2), (5, 2), (7, 3), (8, 4)])
def test_restarts_synchronisations_and_demand_fetches_are_counted_as_written(layers, slots):
    last = layers - 1

    def counts(*calls):
        schedule = PrefetchSchedule(layers, slots)
        actions = [a for name, *args in calls for a in (getattr(schedule, name)(*args) or ())]
        return [sum(isinstance(a, kind) for a in actions) for kind in (Demand, Restart, Synchronise)]

    begin = [("start_forward",)]
    whole = [call for layer in range(layers) for call in (("bind", layer), ("finish", layer))]
    assert counts(*begin, *begin, *whole, *begin, *whole) == [0, 0, 0]
    assert counts(*whole, *whole) == [1, 1, 0]  # only the very first layer was on demand
    assert counts(*begin, *whole[:-1], *begin, *whole) == [0, 1, 1]  # the last finish is missing
    assert counts(*begin, *whole[:-1], *whole) == [1, 1, 1]  # and no start
    assert counts(*begin, *whole[:-2], *begin, *whole) == [0, int(last > 0), 0]
    assert counts(*begin, *whole[:-1], ("invalidate",), *begin, *whole) == [0, 1, 1]
    assert counts(*begin, *whole, ("invalidate",), *begin, *whole) == [0, 0, 0]


def test_a_start_that_failed_is_completed_by_the_next_one():
    schedule = PrefetchSchedule(4, 3)
    actions = schedule.start_forward()
    assert next(actions) == Issue(0, 0) and next(actions) == Issue(1, 1)
    actions.close()  # E(1) failed while it was performed
    assert text(schedule.start_forward()) == "E(1), E(2)"
    assert text(schedule.start_forward()) == ""


def test_a_finish_without_its_bind_and_a_layer_out_of_range_are_refused():
    schedule = PrefetchSchedule(3, 2)
    with pytest.raises(RuntimeError, match="finish of layer 1 without its bind: none is bound"):
        list(schedule.finish(1))
    with pytest.raises(ValueError, match="layer 3 is not one of the 3"):
        list(schedule.bind(3))
