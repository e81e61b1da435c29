"""`dwdp simulate`: its document, its exit codes, scripts, and the refusals."""

from __future__ import annotations

import json

import pytest

from dwdp.tools.cli import run
from dwdp.tools.copy_order import Setting, forward_order, hook_copies, order_problems
from dwdp.tools.mutations import MUTATIONS
from dwdp.tools.races import find_races
from dwdp.tools.simulate import Simulation
from dwdp.tools.simulate_script import Abort, Event, parse_script


def simulate(capsys, *arguments: str, code: int = 0) -> str:
    assert run(["simulate", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def document(capsys, *arguments: str, code: int = 0) -> dict:
    return json.loads(simulate(capsys, *arguments, "--json", code=code))


def refused(capsys, arguments: list[str], *words: str) -> None:
    assert run(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1, captured
    assert all(word in captured.err for word in words), captured.err


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "events.txt"
        path.write_text(text)
        return str(path)

    return write


# ---- the document ----


@pytest.mark.parametrize("mode", ["attached", "standalone", "experts"])
@pytest.mark.parametrize("segments", ["attn,moe", "attn"])
def test_the_document_of_a_clean_run(capsys, mode, segments):
    found = document(capsys, "--layers", "5", "--slots", "3", "--mode", mode, "--segments", segments, "--forwards", "2")
    assert (found["races"], found["order_problems"], found["fences"], found["demand_fetches"]) == ([], [], 0, 0)
    assert found["counters"]["forwards"] == 2
    assert find_races(found) == []
    reads = [op for op in found["ops"] if op["kind"] == "read"]
    letters = {"A", *("D" if "moe" in segments else "")} if mode != "experts" else set()
    letters |= {"E"} if mode != "standalone" else set()
    assert {op["slot"][0] for op in reads} == letters
    for segment in letters:  # every layer is read in every forward
        layers = [op["layer"] for op in reads if op["slot"][0] == segment and op["stream"] == "compute"]
        assert sorted(set(layers)) == list(range(5)) and len(layers) in (10, 20)


def test_ops_are_in_the_neutral_form(capsys):
    ops = document(capsys, "--layers", "3", "--slots", "2", "--forwards", "1")["ops"]
    assert {op["kind"] for op in ops} == {"copy", "read", "record", "wait", "mark"}
    assert {op["name"] for op in ops if op["kind"] == "mark"} == {
        "start",
        "H0",
        "H1",
        "H2",
        "bind",
        "finish",
        "H3",
        "end",
    }
    assert {op["stream"] for op in ops if op["kind"] != "mark"} == {"compute", "copy", "aux0"}
    for op in ops:
        assert {"stream", "kind", "slot", "layer", "event"} <= set(op) <= {
            "stream", "kind", "slot", "layer", "event", "name", "epoch",
        }  # fmt: skip
        if op["kind"] in ("copy", "read"):
            assert op["slot"] == f"{op['slot'][0]}{op['layer'] % {'A': 2, 'D': 3, 'E': 2}[op['slot'][0]]}"
        assert (op["event"] is not None) == (op["kind"] in ("record", "wait"))


def test_the_copy_order_is_printed_hook_by_hook(capsys):
    text = simulate(capsys, "--layers", "4", "--slots", "2", "--forwards", "1")
    assert (
        text.partition("\n\n")[0]
        == """\
start      L(0) L(1) E(0) E(1)
H2(0)      L(2)
finish(0)  E(2)
H2(1)      L(3)
finish(1)  E(3)
finish(2)  E(0)
finish(3)  E(1)
H3(3)      L(0) L(1)
end"""
    )
    assert text.splitlines()[-1] == "clean: no race, no copy out of order"


def test_auxiliary_streams_read_and_are_joined(capsys):
    for number in (0, 2):
        ops = document(capsys, "--layers", "3", "--slots", "2", "--aux", str(number))["ops"]
        streams = {op["stream"] for op in ops if op["kind"] == "read"}
        assert streams == {"compute", *(f"aux{i}" for i in range(number))}


# ---- what is found ----


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_found_by_the_command(capsys, name):
    for mode in MUTATIONS[name].modes:
        found = document(capsys, "--layers", "4", "--slots", "2", "--mode", mode, "--mutate", name, code=1)
        assert found["races"] or found["order_problems"]
        text = simulate(capsys, "--layers", "4", "--slots", "2", "--mode", mode, "--mutate", name, code=1)
        assert "\nrace: " in text or "\norder: " in text


def test_a_race_of_the_document_points_into_its_ops(capsys):
    found = document(
        capsys, "--layers", "4", "--slots", "2", "--forwards", "2", "--mutate", "end-of-read-missing-e", code=1
    )
    for race in found["races"]:
        copy, read = found["ops"][race["op"]], found["ops"][race["other"]]
        assert (copy["kind"], read["kind"]) == ("copy", "read")
        assert copy["slot"] == read["slot"] == race["slot"]
        assert race["text"].startswith(f"op {race['op']}, copy of layer {race['layer']} in {race['slot']}")


def test_mutations_are_listed_with_what_they_change(capsys):
    text = simulate(capsys, "--list-mutations")
    assert [line.split()[0] for line in text.splitlines()] == list(MUTATIONS)
    listed = json.loads(simulate(capsys, "--list-mutations", "--json"))
    assert [one["name"] for one in listed] == list(MUTATIONS)
    assert all(one["text"] and one["modes"] for one in listed)


# ---- scripts ----

RECOVERIES = """
# comments and empty lines are skipped

forward
abort before-H1 2            # then the start leaves everything to H0
forward
abort after-bind 1 without-start
forward without-start
abort before-H2 0
invalidate
forward
abort before-H3 3
start
abort in-H0
abort in-fill 0 3
forward
invalidate
abort in-start 4
forward
release
"""


def test_a_script_of_aborts_is_played_and_clean(capsys, script):
    found = document(capsys, "--layers", "4", "--slots", "2", "--script", script(RECOVERIES))
    names = [op["name"] for op in found["ops"] if op["kind"] == "mark"]
    assert names.count("abort") == 7 and names.count("invalidate") == 2 and names.count("end") == 6
    assert found["ops"][-1]["kind"] == "sync"
    assert found["counters"]["synchronisations"] == 1 and found["counters"]["barriers"] == 6
    epochs = [op["epoch"] for op in found["ops"] if "epoch" in op]
    assert epochs == sorted(epochs) and set(epochs) == {0, 1, 2}


def test_an_abort_stands_where_the_script_puts_it():
    setting = Setting(4, 2)
    for point, last in {
        "before-H1 2": "H3(1)", "before-H2 2": "H1(2)", "after-bind 2": "bind(2)", "before-H3 2": "finish(2)",
        "in-fill 1 1": "H2(1)", "in-fill 1 7": "finish(1)", "in-start 1": "start", "in-H0 1": "H0",
    }.items():  # fmt: skip
        simulation = Simulation(setting)
        (event,) = parse_script(f"abort {point}", setting)
        assert not simulation.forward(start=event.started, abort=event.abort)
        sections = [section.hook for section in hook_copies(simulation.ops)]
        assert sections[-2:] == [last, "abort"], point


def test_events_are_what_the_lines_say():
    setting = Setting(4, 2)
    assert parse_script("forward\n forward without-start # x\nabort in-H0 3\nabort in-fill 2", setting) == [
        Event("forward", True, None, 1),
        Event("forward", False, None, 2),
        Event("abort", False, Abort("in-H0", None, 3), 3),
        Event("abort", True, Abort("in-fill", 2, 2), 4),
    ]


def test_experts_alone_without_a_start_are_fetched_on_demand_and_that_is_no_finding(capsys, script):
    path = script("forward without-start\nforward\n")
    found = document(capsys, "--layers", "3", "--slots", "2", "--mode", "experts", "--script", path)
    assert found["demand_fetches"] == 1
    found = document(capsys, "--layers", "3", "--slots", "2", "--script", path)
    assert found["demand_fetches"] == 0, "attached H0 primes"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no event"]),
        ("forward\nfrobnicate\n", ["line 2", "frobnicate", "invalidate"]),
        ("abort\n", ["line 1", "before-H1"]),
        ("abort before-H9 1\n", ["line 1", "before-H9"]),
        ("abort before-H1\n", ["line 1", "layer from 0 to 3"]),
        ("abort before-H1 4\n", ["line 1", "layer from 0 to 3"]),
        ("abort before-H1 -1\n", ["line 1", "whole numbers"]),
        ("abort before-H1 1 2\n", ["line 1", "inside a hook"]),
        ("abort in-fill 1 0\n", ["line 1", "from 1 on"]),
        ("abort in-start without-start\n", ["line 1", "needs the start"]),
        ("forward twice\n", ["line 1", "twice"]),
        ("start without-start\n", ["line 1", "without-start"]),
        ("release\nforward\n", ["line 2", "release"]),
        ("forward\nabort in-H0\n", ["line 2", "did not fail"]),
        ("abort in-fill 3 99\n", ["line 1", "did not fail"]),
    ],
)
def test_a_bad_script_is_refused_by_its_line(capsys, script, text, words):
    path = script(text)
    refused(capsys, ["--layers", "4", "--slots", "2", "--script", path], *words)


def test_points_that_a_mode_does_not_have_are_refused(capsys, script):
    for mode, text in (("standalone", "abort after-bind 0"), ("standalone", "invalidate"), ("experts", "abort in-H0")):
        refused(capsys, ["--layers", "4", "--slots", "2", "--mode", mode, "--script", script(text)], "line 1", mode)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--layers"]),
        (["--layers", "0"], ["--layers", "0"]),
        (["--layers", "three"], ["--layers", "three"]),
        (["--layers", "3", "--slots", "1"], ["--slots", "1"]),
        (["--layers", "3", "--mode", "both"], ["--mode", "both"]),
        (["--layers", "3", "--segments", "moe"], ["--segments", "moe"]),
        (["--layers", "3", "--segments", "attn,attn"], ["--segments", "attn,attn"]),
        (["--layers", "3", "--forwards", "0"], ["--forwards", "0"]),
        (["--layers", "3", "--mutate", "nothing"], ["--mutate", "nothing"]),
        (["--layers", "3", "--mode", "experts", "--mutate", "no-fill-at-h2"], ["no-fill-at-h2", "experts"]),
        (["--layers", "3", "--script", "/nowhere/events"], ["--script", "/nowhere/events"]),
        (["--layers", "3", "--script", "/nowhere/events", "--forwards", "2"], ["--script", "--forwards"]),
    ],
)
def test_bad_options_are_refused_by_name_and_value(capsys, arguments, words):
    refused(capsys, arguments, *words)


# ---- the second account of the copy order ----


def test_the_order_of_a_forward_is_computed_from_the_slots():
    assert forward_order(Setting(5, 3, "experts")) == {
        "finish(0)": ["E(3)"], "finish(1)": ["E(4)"], "finish(3)": ["E(0)"], "finish(4)": ["E(1)", "E(2)"],
    }  # fmt: skip
    assert forward_order(Setting(5, mode="standalone")) == {"H2(0)": ["L(2)"], "H2(1)": ["L(3)"], "H2(2)": ["L(4)"]}
    assert forward_order(Setting(1)) == {"H3(0)": ["L(0)"], "finish(0)": ["E(0)"]}
    assert forward_order(Setting(3, 2, segments="A"))["H2(2)"] == ["L(0)", "L(1)"]


def test_a_copy_that_is_early_late_or_missing_is_named():
    setting = Setting(3, 2)
    simulation = Simulation(setting)
    simulation.forward()
    ops = simulation.ops
    at = next(i for i, op in enumerate(ops) if op["kind"] == "copy" and op["slot"] == "E0" and op["layer"] == 2)
    assert order_problems(ops[:at] + ops[at + 1 :], setting) == ["finish(0) enqueues nothing instead of E(2)"]
    late = [*ops[:at], *ops[at + 1 :], ops[at]]
    assert order_problems(late, setting) == [
        "finish(0) enqueues nothing instead of E(2)",
        "end enqueues E(2) instead of nothing",
    ]
    assert order_problems(ops[1:], setting) == [
        "before the first hook enqueues L(0) L(1) E(0) E(1) instead of nothing",
        "H0 enqueues nothing instead of L(0) L(1) E(0) E(1)",
    ]
