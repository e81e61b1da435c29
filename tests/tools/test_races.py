"""The race checker on traces written by hand, without any of our runtimes, and against a judge by search."""

from __future__ import annotations

import json
import random

import pytest

from dwdp.tools.races import find_races, main


def trace(text: str) -> dict:
    """Lines "stream copy|read SLOT LAYER [part/parts] [epoch=N]", "stream record|wait EVENT", "sync", "mark NAME"."""
    ops = []
    for line in filter(str.strip, text.splitlines()):
        stream, kind, *rest = [*line.split(), "", ""][: max(2, len(line.split()))]
        if stream in ("sync", "mark"):
            stream, kind, rest = "host", stream, [kind]
        op = {"stream": stream, "kind": kind, "slot": None, "layer": None, "event": None}
        if kind in ("copy", "read"):
            op |= {"slot": rest[0], "layer": int(rest[1])}
            for more in rest[2:]:
                if "/" in more:
                    op |= dict(zip(("part", "parts"), map(int, more.split("/"))))
                else:
                    op["epoch"] = int(more.removeprefix("epoch="))
        elif kind in ("record", "wait"):
            op["event"] = rest[0]
        ops.append(op)
    return {"ops": ops}


def kinds(text: str) -> list[str]:
    return [race.kind for race in find_races(trace(text))]


FILLED = """
    dma copy X 0
    dma record ready
    gpu wait ready
    gpu read X 0
"""


@pytest.mark.parametrize(
    "text",
    [
        FILLED,
        FILLED + "gpu record done\n dma wait done\n dma copy X 1\n dma record ready\n gpu wait ready\n gpu read X 1",
        FILLED + "sync\n dma copy X 1\n sync\n other read X 1",
        # through a third stream
        FILLED + "gpu record a\n third wait a\n third record b\n dma wait b\n dma copy X 1",
        # an auxiliary stream that is joined before the end of the window
        """dma copy X 0
        dma record ready
        gpu wait ready
        gpu record fork
        aux wait fork
        aux read X 0
        gpu read X 0
        aux record join
        gpu wait join
        gpu record done
        dma wait done
        dma copy X 1""",
        # parts on two streams
        """dma copy X 0 0/2
        dma2 copy X 0 1/2
        dma record a
        dma2 record b
        gpu wait a
        gpu wait b
        gpu read X 0""",
        # a part that was copied in vain before, and again
        "gpu copy X 0 1/3\n gpu copy X 0 0/3\n gpu copy X 0 1/3\n gpu copy X 0 2/3\n gpu read X 0",
        "gpu copy X 0 epoch=1\n gpu read X 0 epoch=1\n gpu read X 0",
        "host copy X 0\n gpu read X 0",
        "dma copy X 0\n dma record e\n host wait e\n gpu read X 0",
        "mark start\n mark H0",
        "",
    ],
)
def test_ordered_traces_are_clean(text):
    assert kinds(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dma copy X 0\n gpu read X 0", ["unordered"]),
        ("dma copy X 0\n gpu wait ready\n dma record ready\n gpu read X 0", ["unordered"]),
        ("dma record ready\n dma copy X 0\n gpu wait ready\n gpu read X 0", ["unordered"]),
        ("gpu read X 0", ["unfilled"]),
        ("dma copy Y 0\n sync\n gpu read X 0", ["unfilled"]),
        (FILLED + "dma copy X 1", ["overwritten"]),
        (FILLED + "dma wait done\n gpu record done\n dma copy X 1", ["overwritten"]),
        (FILLED + "gpu record done\n gpu read X 0\n dma wait done\n dma copy X 1", ["overwritten"]),
        (FILLED + "gpu read X 1", ["wrong layer"]),
        # the copy of the next layer runs beside the read of this one
        ("dma copy X 0\n sync\n dma copy X 2\n gpu read X 0", ["wrong layer", "unordered"]),
        # a record that comes too late does not move a wait
        (FILLED + "gpu record done\n dma wait done\n gpu read X 0\n gpu record done\n dma copy X 1", ["overwritten"]),
        # an auxiliary stream that nobody joins
        (
            """dma copy X 0
            sync
            aux read X 0
            gpu read X 0
            gpu record done
            dma wait done
            dma copy X 1""",
            ["overwritten"],
        ),
        ("dma copy X 0 0/2\n sync\n gpu read X 0", ["incomplete"]),
        ("dma copy X 0 0/2\n dma2 copy X 0 1/2\n dma record a\n gpu wait a\n gpu read X 0", ["unordered"]),
        ("dma copy X 0 0/2\n dma copy X 1 1/2\n sync\n gpu read X 1", ["incomplete"]),
        ("dma copy X 0 epoch=1\n sync\n gpu read X 0 epoch=2", ["stale"]),
        ("dma copy X 0\n dma2 copy X 1\n sync\n gpu read X 1", ["crossed"]),
        ("gpu read X 0\n host copy X 0", ["unfilled", "overwritten"]),
    ],
)
def test_what_is_not_ordered_or_not_there_is_found(text, expected):
    assert kinds(text) == expected


def test_a_race_names_both_ops():
    (race,) = find_races(trace(FILLED + "dma copy X 1"))
    assert (race.slot, race.layer, race.op, race.other) == ("X", 1, 4, 3)
    assert race.text == (
        "op 4, copy of layer 1 in X on dma, may run while the slot is still read: op 3, read of layer 0 in X on gpu"
    )
    assert race.as_dict()["text"] == race.text


@pytest.mark.parametrize("op", [{}, {"kind": "fly", "stream": "s"}, {"kind": "copy"}])
def test_what_is_not_in_the_neutral_form_is_refused_by_number(op):
    with pytest.raises(ValueError, match="op 1 of the trace"):
        find_races([{"kind": "mark", "name": "start"}, op])


def test_the_command_judges_a_file(tmp_path, capsys):
    path = tmp_path / "trace.json"
    for text, code in ((FILLED, 0), ("gpu read X 0", 1)):
        path.write_text(json.dumps(trace(text)))
        assert main([str(path)]) == code
    assert "unfilled: op 0, read of layer 0 in X on gpu" in capsys.readouterr().out
    path.write_text("{}")
    assert main([str(path)]) == main([]) == main(["/nowhere"]) == 2


# ---- against a search in the graph of ops ----


def ancestors(ops: list[dict]) -> list[set[int]]:
    """For each op all ops that run before it for certain, by the rules alone, in quadratic time."""
    before: list[set[int]] = []
    last, events, synced = {}, {}, set()
    for number, op in enumerate(ops):
        if op["kind"] == "sync":
            synced |= set(range(number))
        mine = set(synced)
        parents = [last.get(op["stream"])]
        if op["kind"] == "wait":
            parents.append(events.get(op["event"]))
        for parent in parents:
            if parent is not None:
                mine |= before[parent] | {parent}
        before.append(mine)
        last[op["stream"]] = number
        if op["kind"] == "record":
            events[op["event"]] = number
    return before


def random_ops(rng: random.Random) -> list[dict]:
    streams, events = ["a", "b", "c"][: rng.randint(2, 3)], ["e", "f", "g"]
    lines = []
    for _ in range(rng.randint(4, 40)):
        stream, kind = rng.choice(streams), rng.choice(["copy", "read", "record", "wait", "record", "wait"])
        if rng.random() < 0.03:
            lines.append("sync")
        elif kind in ("copy", "read"):
            lines.append(f"{stream} {kind} {rng.choice('XY')} {rng.randint(0, 1)}")
        else:
            lines.append(f"{stream} {kind} {rng.choice(events)}")
    return trace("\n".join(lines))["ops"]


@pytest.mark.parametrize("seed", range(4))
def test_random_traces_are_judged_as_a_search_for_paths_does(seed):
    rng = random.Random(seed)
    racy = 0
    for _ in range(250):
        ops = random_ops(rng)
        before = ancestors(ops)
        overwritten, unordered, misread = set(), set(), set()
        for number, op in enumerate(ops):
            if op["kind"] not in ("copy", "read"):
                continue
            earlier = [i for i in range(number) if ops[i]["slot"] == op["slot"]]
            copies = [i for i in earlier if ops[i]["kind"] == "copy"]
            if op["kind"] == "read":
                unordered |= {i for i in copies if i not in before[number]}
                if not copies or ops[copies[-1]]["layer"] != op["layer"]:
                    misread.add(number)
            elif any(ops[i]["kind"] == "read" and i not in before[number] for i in earlier):
                overwritten.add(number)
        races = find_races(ops)
        assert {race.op for race in races if race.kind == "overwritten"} == overwritten
        assert {race.op for race in races if race.kind in ("wrong layer", "unfilled")} == misread
        # a copy that an older one may overtake is reported instead of the reads behind both
        if unordered:
            assert any(race.kind in ("unordered", "crossed") for race in races)
        assert {race.other for race in races if race.kind == "unordered"} <= unordered
        racy += bool(races)
    assert 0 < racy < 250
