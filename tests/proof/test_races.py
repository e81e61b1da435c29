"""The schedules cannot race: the real runtimes over a recording device, every copy and read judged by vector clocks.

Nothing runs here, so that 92 layers and thousands of sequences of aborts take seconds. That the judge can fail is
shown by mutations, at the end, and by traces written by hand in tests/tools/test_races.py.
"""

from __future__ import annotations

import functools
import logging
import random

import pytest

from dwdp.runtime.dense_schedule import DenseSchedule
from dwdp.tools.copy_order import Setting, forward_order, hook_copies, order_problems
from dwdp.tools.mutations import MUTATIONS
from dwdp.tools.races import find_races
from dwdp.tools.simulate import Parts, Simulation, simulate
from dwdp.tools.simulate_script import Abort, Event, parse_script

LAYERS = [1, 2, 3, 4, 5, 58, 92]
SLOTS = [2, 3, 4]
MODES = [
    *(("attached", segments, slots) for segments in ("AD", "A") for slots in SLOTS),
    *(("standalone", segments, 2) for segments in ("AD", "A")),
    *(("experts", "AD", slots) for slots in SLOTS),
]
every_mode = pytest.mark.parametrize(("mode", "segments", "slots"), MODES)
modes_with_dense = pytest.mark.parametrize(("mode", "segments", "slots"), [m for m in MODES if m[0] != "experts"])
modes_with_experts = pytest.mark.parametrize(("mode", "segments", "slots"), [m for m in MODES if m[0] != "standalone"])
every_size = pytest.mark.parametrize("layers", LAYERS)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(simulation: Simulation, *, demanded: bool = False) -> None:
    """No race, the copies in order, no fence, and no demand fetch unless the experts were not announced."""
    assert find_races({"ops": simulation.ops}) == []
    assert order_problems(simulation.ops, simulation.setting) == []
    assert simulation.counters.fences == 0
    assert demanded or simulation.counters.demand_fetches == 0


def lines(ops: list[dict]) -> list[str]:
    return [" ".join(str(section).split()) for section in hook_copies(ops)]


# ---- clean runs ----


@every_mode
@every_size
def test_a_clean_run_never_waits_fences_or_fetches_on_demand_and_leaves_each_forward_primed(
    layers, mode, segments, slots
):
    setting = Setting(layers, slots, mode, segments)
    simulation = Simulation(setting)
    counters = simulation.counters
    for number in range(4):
        simulation.forward()
        assert simulation.primed == (mode != "standalone")
        assert counters.primed_forwards == (0 if mode == "standalone" else number)
    check(simulation)
    assert (counters.forwards, counters.barriers, counters.restarts, counters.synchronisations) == (4, 0, 0, 0)
    assert not [op for op in simulation.ops if op["kind"] == "sync" or op.get("name") in ("fence", "demand", "barrier")]
    ahead = 0 if mode == "standalone" else len(setting.first_copies)
    assert counters.copies == 4 * layers * (setting.dense + setting.experts) + ahead


@every_mode
@every_size
def test_a_warm_up_forward_without_a_start_primes_itself(layers, mode, segments, slots):
    simulation = Simulation(Setting(layers, slots, mode, segments))
    for start in (False, True, False, True):
        simulation.forward(start=start)
    check(simulation, demanded=mode == "experts")
    assert simulation.counters.demand_fetches == (mode == "experts")
    assert simulation.counters.synchronisations == simulation.counters.barriers == 0


@pytest.mark.parametrize(
    ("remainder", "order"),
    [
        (0, "L1 E1 L2 E2"), (1, "E1 E2 L1 L2"), (2, "E1 L1 E2 L2"),
        (3, "L1 L2 E1 E2"), (4, "E1 E2 L1 L2"), (5, "L1 E1 E2 L2"),
    ],
)  # fmt: skip
def test_the_order_at_a_forwards_end_follows_from_the_number_of_layers(remainder, order):
    for layers in range(remainder, 40, 6):
        simulation = Simulation(Setting(layers, 2)) if layers > 1 else None
        for _ in range(3 if simulation else 0):
            simulation.forward()
            tail = [copy for section in hook_copies(simulation.ops) for copy in section.copies][-4:]
            assert [f"{copy[0]}{int(copy[2:-1]) + 1}" for copy in tail] == order.split(), layers


def test_the_boundary_of_92_layers_reads_as_written():
    text = {}
    for segments in ("AD", "A"):
        simulation = Simulation(Setting(92, 2, "attached", segments))
        simulation.forward()
        simulation.ops.clear()
        simulation.forward()
        shown = [line for line in lines(simulation.ops) if " " in line]
        text[segments] = "\n".join(shown[:4] + shown[-6:])
    assert (
        text["AD"]
        == """\
H2(0) L(2)
finish(0) E(2)
H2(1) L(3)
finish(1) E(3)
H2(89) L(91)
finish(89) E(91)
finish(90) E(0)
H3(90) L(0)
finish(91) E(1)
H3(91) L(1)"""
    )
    assert (
        text["A"]
        == """\
H2(0) L(2)
finish(0) E(2)
H2(1) L(3)
finish(1) E(3)
H2(89) L(91)
finish(89) E(91)
H2(90) L(0)
finish(90) E(0)
H2(91) L(1)
finish(91) E(1)"""
    )


def test_standalone_keeps_one_schedule_per_forward():
    simulation = Simulation(Setting(5, mode="standalone"))
    for _ in range(2):
        simulation.forward()
    shown = [line for line in lines(simulation.ops) if " " in line]
    assert shown == ["start L(0) L(1)", "H2(0) L(2)", "H2(1) L(3)", "H2(2) L(4)"] * 2


# ---- aborts between hooks ----


def places(layers: int) -> list[int]:
    return sorted({0, min(1, layers - 1), layers // 2, max(0, layers - 2), layers - 1})


def after_abort(setting: Setting, point: str, layer: int, invalidated: bool) -> str:
    """What H0 enqueues after an abort, in words."""
    dense = [copy for copy in setting.first_copies if copy[0] == "L"]
    experts = [copy for copy in setting.first_copies if copy[0] == "E"]
    before_bind = layer == 0 and point in ("before-H1", "before-H2")
    behind_finish = layer == setting.layers - 1 and point == "before-H3"
    if (before_bind or behind_finish) and not invalidated:
        experts = []  # in flight
    return " ".join(["barrier", *dense, *["sync"] * (point == "after-bind"), *experts])


def in_words(ops: list[dict]) -> dict[str, str]:
    """Hook -> barriers, syncs and copies in it, in order."""
    found: dict[str, list[str]] = {}
    hook = ""
    for op in ops:
        if op["kind"] == "mark" and op["name"] in ("start", "H0", "H1", "bind"):
            hook = op["name"]
        elif op["kind"] == "mark" and op["name"] == "barrier" or op["kind"] == "sync":
            found.setdefault(hook, []).append(op.get("name", "sync"))
        elif op["kind"] == "copy":
            copy = f"{'E' if op['slot'][0] == 'E' else 'L'}({op['layer']})"
            if found.setdefault(hook, [""])[-1] != copy:
                found[hook].append(copy)
    return {hook: " ".join(filter(None, what)) for hook, what in found.items()}


@every_mode
@every_size
def test_a_forward_that_fails_between_hooks_is_recovered_in_the_order_written_down(layers, mode, segments, slots):
    """At the first, second, middle and last two layers, with and without the executor's start, with new weights."""
    setting = Setting(layers, slots, mode, segments)
    simulation = Simulation(setting)
    simulation.forward()
    counters, bound, failed = simulation.counters, 0, 0
    points = [
        point for point in ("before-H1", "before-H2", "after-bind", "before-H3") if setting.experts or "H" in point
    ]
    for layer in places(layers):
        for point in points:
            for start in (True, False):
                for invalidated in (False, True) if setting.experts else (False,):
                    assert not simulation.forward(start=start, abort=Abort(point, layer))
                    failed, bound = failed + 1, bound + (point == "after-bind")
                    if invalidated:
                        simulation.invalidate()
                    at = len(simulation.ops)
                    assert simulation.forward(start=start)
                    words = in_words(simulation.ops[at:])
                    if setting.dense:
                        assert "start" not in words
                        assert words["H0"] == after_abort(setting, point, layer, invalidated)
                        assert counters.barriers == failed
                    assert counters.synchronisations == bound
    check(simulation, demanded=mode == "experts")
    if mode == "attached":
        assert simulation.primed


@every_mode
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_first_forward_that_fails_leaves_nothing_that_the_next_could_trip_over(layers, mode, segments, slots):
    setting = Setting(layers, slots, mode, segments)
    for layer in range(layers):
        for point in ("before-H1", "before-H2", "before-H3") + (("after-bind",) if setting.experts else ()):
            for start in (True, False):
                simulation = Simulation(setting)
                assert not simulation.forward(start=start, abort=Abort(point, layer))
                assert simulation.forward(start=start) and simulation.forward()
                check(simulation, demanded=mode == "experts")


# ---- aborts inside hooks, at every op on the copy stream ----


@every_mode
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("start", [True, False])
def test_a_forward_that_fails_inside_a_fill_is_recovered(layers, mode, segments, slots, start):
    setting = Setting(layers, slots, mode, segments)
    simulation, failed, over = Simulation(setting), 0, 0
    counters = simulation.counters
    simulation.forward()
    for layer in range(layers):
        op = 0
        while not simulation.forward(abort=Abort("in-fill", layer, op := op + 1)):
            last = hook_copies(simulation.ops)[-2].hook  # the hook that failed
            ended = last == f"H3({layers - 1})"
            failed, over, at = failed + 1, over + ended, len(simulation.ops)
            if ended and start:
                simulation.start()
                before_start = in_words(simulation.ops[at:]).get("start", "")
                assert "barrier" not in before_start and "E" not in before_start
                assert before_start.endswith("L(1)" if layers > 1 else "L(0)")
            assert simulation.forward(start=start)
            if setting.dense:
                assert counters.barriers == failed - over, "the forward is over inside the last H3, and only there"
        assert (op > 1) == any(hook.endswith(f"({layer})") for hook in forward_order(setting))
    check(simulation, demanded=mode == "experts")
    assert counters.synchronisations == 0


@every_mode
@pytest.mark.parametrize("layers", [1, 2, 3, 5, 92])
@pytest.mark.parametrize("again", [True, False])
def test_a_start_that_fails_is_completed_by_the_next_start_or_by_H0(layers, mode, segments, slots, again):
    setting, op = Setting(layers, slots, mode, segments), 0
    fresh = Simulation(setting)
    fresh.forward()
    while True:
        simulation = Simulation(setting)
        if simulation.forward(abort=Abort("in-start", op=(op := op + 1))):
            break
        assert simulation.forward(start=again)
        check(simulation, demanded=mode == "experts")
        if again or setting.dense:
            whole = {n["layer"] for n in simulation.ops if n["kind"] == "record" and "ready" in (n["event"] or "")}
            assert whole == set(range(layers)) and simulation.counters.barriers == 0
            copies, expected = simulation.counters.copies, fresh.counters.copies
            assert copies == expected, "nothing that was enqueued whole is enqueued again"
    assert op > 3 * len(setting.first_copies)


@modes_with_dense
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("cold", [True, False])
def test_a_priming_inside_H0_that_fails_leaves_the_forward_open(layers, mode, segments, slots, cold):
    setting, op = Setting(layers, slots, mode, segments), 0
    while True:
        simulation = Simulation(setting)
        if not cold:
            simulation.forward()
            simulation.forward(abort=Abort("after-bind" if setting.experts else "before-H3", layers // 2))
        if simulation.forward(start=False, abort=Abort("in-H0", op=(op := op + 1))):
            break
        failed = simulation.counters.barriers
        at = len(simulation.ops)
        assert simulation.forward(start=op % 2 == 0)
        words = in_words(simulation.ops[at:])
        assert "start" not in words and words["H0"].startswith("barrier L(0)")
        assert simulation.counters.barriers == failed + 1
        check(simulation)
    assert op > 3


# ---- new weights, release, fences ----


@modes_with_experts
@every_size
def test_new_weights_are_gathered_again_for_experts_only(layers, mode, segments, slots):
    setting = Setting(layers, slots, mode, segments)
    for start in (True, False):
        simulation = Simulation(setting)
        simulation.forward()
        simulation.invalidate()
        at = len(simulation.ops)
        simulation.forward(start=start)
        words = in_words(simulation.ops[at:])
        experts = [copy for copy in setting.first_copies if copy[0] == "E"]
        hook = "start" if start else "H0" if setting.dense else "bind"
        assert words[hook].split()[: len(experts)] == experts
        assert hook == "bind" or words[hook].split() == experts
        assert set(words) <= {hook, "H1", "bind"}
        check(simulation, demanded=mode == "experts")
        assert simulation.counters.synchronisations == simulation.counters.barriers == 0


@every_mode
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_release_waits_for_copies_in_flight_and_nothing_is_enqueued_behind_it(layers, mode, segments, slots):
    for abort in (None, Abort("before-H2", layers - 1), Abort("in-start", op=2)):
        simulation = Simulation(Setting(layers, slots, mode, segments))
        simulation.forward(abort=abort)
        simulation.release()
        at = len(simulation.ops)
        assert simulation.ops[-1]["kind"] == "sync"
        if simulation.dense is not None:
            simulation.dense.h0()
            for hook in (simulation.dense.h1, simulation.dense.h2, simulation.dense.h3):
                hook(0)
        if simulation.manager is not None:
            simulation.release()
        assert len(simulation.ops) == at
        check(simulation)


class Jump(DenseSchedule):
    """Gathers a layer too early, into slots that are read."""

    def h1(self, pos):
        yield from super().h1(pos)
        if pos == 0:
            yield from self._gather(2)


@pytest.mark.parametrize("num_aux", [0, 1, 2])
@pytest.mark.parametrize("segments", ["AD", "A"])
def test_a_copy_into_a_slot_with_an_open_window_takes_a_fence_and_is_counted(segments, num_aux):
    simulation = Simulation(Setting(6, 2, "attached", segments, num_aux))
    simulation.dense.h0()
    simulation.dense.h1(0)
    window = simulation.device.event("window")
    simulation.device.record(window, simulation.device.compute)
    for stream in (simulation.device.compute, *simulation.device.auxiliary):
        simulation.device.wait(stream, window)
        simulation.read(stream, "A", 0)
        simulation.read(stream, "D", 0)
    simulation.dense.h1(4)  # a caller that leaves the sequence, to a layer with the slots of the one it was in
    simulation.read(simulation.device.compute, "A", 4)
    simulation.read(simulation.device.compute, "D", 4)
    assert (simulation.counters.fences, simulation.counters.demand_fetches) == (1, 1)
    assert find_races(simulation.ops) == []
    at = next(number for number, op in enumerate(simulation.ops) if op.get("name") == "fence")
    fence = [op for op in simulation.ops[at + 1 : at + 3 + 2 * num_aux] if op["kind"] == "wait"]
    assert len(fence) == 1 + num_aux
    for wait in fence:
        without = [op for op in simulation.ops if op is not wait]
        assert {race.kind for race in find_races(without)} == {"overwritten"}

    simulation = Simulation(Setting(6, 2, "attached", segments), Parts(schedule=Jump))
    simulation.dense.h0()
    simulation.dense.h1(0)
    simulation.read(simulation.device.compute, "A", 0)
    assert simulation.counters.fences == 1


# ---- random sequences ----


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_of_aborts_failed_starts_and_invalidations_never_race(seed):
    rng = random.Random(seed)
    for _ in range(200):
        mode = rng.choice(["attached", "attached", "attached", "standalone", "experts"])
        setting = Setting(rng.randint(1, 6), rng.choice(SLOTS), mode, rng.choice(["AD", "A"]), rng.randint(0, 2))
        simulation = Simulation(setting)
        for _ in range(rng.randint(2, 6)):
            kind = rng.random()
            if kind < 0.1:
                simulation.start()
            elif kind < 0.25 and setting.experts:
                simulation.invalidate()
            elif kind < 0.4:
                simulation.forward(start=rng.random() < 0.6)
            else:
                simulation.forward(start=rng.random() < 0.6, abort=random_abort(rng, setting))
        simulation.forward(start=rng.random() < 0.6)
        check(simulation, demanded=mode == "experts")
        if mode == "attached":
            assert simulation.primed
    assert simulation.counters.forwards >= 1


def random_abort(rng: random.Random, setting: Setting) -> Abort:
    point = rng.choice(["before-H1", "before-H2", "after-bind", "before-H3", "in-fill", "in-fill", "in-start", "in-H0"])
    layer = None if point in ("in-start", "in-H0") else rng.randrange(setting.layers)
    return Abort(point, layer, rng.randint(1, 12))


# ---- the judge can fail: mutations ----

SIZES = range(1, 8)


@functools.cache
def clean(script: str, setting: Setting) -> bool:
    return simulate(setting, parse_script(script, setting))[1] == []


def verdict(name: str, setting: Setting) -> str:
    """What finds a mutation: race, demand, order (of copies), or nothing. Without it its events must be clean."""
    mutation = MUTATIONS[name]
    script = mutation.script(setting)
    assert clean(script, setting)
    document, found = simulate(setting, parse_script(script, setting), mutation.parts)
    assert bool(found) == bool(document["races"] or document["order_problems"])
    return (
        "race" if document["races"] else "demand" if document["demand_fetches"]
        else "order" if document["order_problems"] else ""
    )  # fmt: skip


def always(setting: Setting) -> bool:
    return True


def filled_at_H2(setting: Setting) -> bool:
    """Both segments: at most two layers are all primed, and wait for D's end of read as well."""
    return setting.layers > 2 or (setting.segments == "A" and setting.mode == "attached")


def ends_are_waited_for(setting: Setting) -> bool:
    return setting.layers > 2 or setting.segments == "A"


def D_changes_hands(setting: Setting) -> bool:
    """At a boundary, where a slot's next layer is not three layers on."""
    return setting.segments == "AD" and setting.layers % 3 != 0


SHOWN = {
    "no-fill-at-h2": ("order", "demand", filled_at_H2),
    "experts-before-dense": ("order", None, always),
    "end-of-read-wrong-slot-a": ("race", "race", ends_are_waited_for),
    "end-of-read-before-kernel-a": ("race", "race", ends_are_waited_for),
    "end-of-read-missing-a": ("race", "race", ends_are_waited_for),
    "end-of-read-wrong-slot-d": ("race", "race", D_changes_hands),
    "end-of-read-before-kernel-d": ("race", "race", D_changes_hands),
    "end-of-read-missing-d": ("race", "race", D_changes_hands),
    "end-of-read-wrong-slot-e": ("race", "race", always),
    "end-of-read-before-kernel-e": ("race", "race", always),
    "end-of-read-missing-e": ("race", "race", always),
    "no-ready-wait-dense": ("race", "race", always),
    "no-ready-wait-e": ("race", "race", always),
    "ready-before-copy": ("race", "race", always),
    "claimed-early-dense": ("race", "race", always),
    "claimed-early-e": ("race", "race", always),
    "barrier-forgets-auxiliary": ("race", "race", lambda setting: setting.segments == "AD"),
    "barrier-forgets-compute": ("race", "race", always),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found_wherever_it_can_show_and_nowhere_else(name):
    attached, elsewhere, shows = SHOWN[name]
    seen = set()
    for layers in SIZES:
        for mode, segments, slots in MODES:
            setting = Setting(layers, slots, mode, segments)
            if mode not in MUTATIONS[name].modes:
                continue
            if mode == "standalone" and layers == 2 and name.startswith("end-of-read-wrong-slot"):
                continue  # two slots that record for each other: the later record covers both
            expected = (attached if mode == "attached" else elsewhere) if shows(setting) else ""
            assert verdict(name, setting) == expected, setting
            seen.add(expected)
    assert seen - {""}


def test_the_mutations_of_the_proof_are_those_of_the_command():
    assert set(SHOWN) == set(MUTATIONS)


def test_a_missing_wait_for_experts_hides_behind_dense_copies_with_more_than_two_slots():
    """Within a forward; experts alone have nothing to hide behind."""
    for mode, slots, racing in (("attached", 2, 88), ("attached", 3, 0), ("experts", 3, 88)):
        parts = MUTATIONS["no-ready-wait-e"].parts
        document, _ = simulate(Setting(92, slots, mode), [Event("forward")] * 2, parts)
        ends = [number for number, op in enumerate(document["ops"]) if op.get("name") == "end"]
        inside = [race for race in document["races"] if race["op"] > ends[0] and 2 <= race["layer"] < 90]
        assert len(inside) == racing, (mode, slots)


@pytest.mark.parametrize("layers", [58, 92])
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_found_at_full_size_too(name, layers):
    setting = Setting(layers, 2, MUTATIONS[name].modes[0])
    assert verdict(name, setting) == SHOWN[name][0]
