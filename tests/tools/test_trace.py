"""The timeline of a real run: the files that a user gets, what is in them, and that their judge can find a race."""

from __future__ import annotations

import json

import pytest

from dwdp import LLM
from dwdp.errors import ConfigError, DwdpError
from dwdp.tools.cli import run
from dwdp.tools.races import find_races
from dwdp.tools.trace import chrome_trace
from tests.executor.checkpoints import write_tiny

EXPERTS = {"host_granule_bytes": 4096, "page_granules": 1}
DENSE = {"enabled": True, "min_bytes": 0}
KEYS = {"stream", "kind", "slot", "layer", "event", "t0", "t1"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64)


def test_every_rank_of_a_run_leaves_a_judged_and_a_drawn_timeline(tiny, tmp_path, capsys):
    """Fails when the runtimes put no read into the trace, or a read in front of its wait."""
    config, folder = tmp_path / "launch.yaml", tmp_path / "new" / "timeline"
    config.write_text(json.dumps({"ranks": 2, "dwdp": EXPERTS | {"dwdp_size": 2}, "dense_dwdp": DENSE}))
    command = ["generate", "--model", str(tiny), "--device", "cpu", "--config", str(config), "--quiet"]
    command += ["--max-tokens", "3", "--ignore-eos", "--prompt", "one", "--prompt", "two", "--trace", str(folder)]
    assert run(command) in (0, None)
    capsys.readouterr()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"rank{rank}{end}.json" for rank in range(2) for end in ("", ".chrome")
    )
    for rank in range(2):
        document = json.loads((folder / f"rank{rank}.json").read_text())
        ops = document["ops"]
        assert document["rank"] == rank and find_races(document) == []
        assert all(KEYS <= op.keys() and op["t0"] <= op["t1"] for op in ops)
        forwards = [op for op in ops if op.get("name") == "end"]
        reads = [op for op in ops if op["kind"] == "read" and op["stream"] == "compute"]
        layers = {op["layer"] for op in reads}
        assert len(forwards) == 3 and len(reads) == 3 * len(layers) * 3 * 2  # E, A and D, both ends of a window
        # What is found is found by these reads: without the waits for copies they race.
        unordered = [op for op in ops if op["kind"] != "wait" or op["stream"] != "compute"]
        assert {race.kind for race in find_races({"ops": unordered})} == {"unordered"}
        drawn = json.loads((folder / f"rank{rank}.chrome.json").read_text())["traceEvents"]
        spans = [event for event in drawn if event.get("cat") == "read"]
        assert len(spans) == len(reads) // 2 and sum(event["dur"] for event in spans) > 0
        assert {event["pid"] for event in drawn} == {rank}


def test_the_api_gives_the_trace_since_set_up_and_only_where_it_is_kept(tiny, warm_start):
    with warm_start(), LLM(tiny, ranks=2, device="cpu", dwdp=EXPERTS, quiet=True, trace=True) as llm:
        first = llm.trace()
        assert [document["rank"] for document in first] == [0, 1] and first[0]["ops"] == []
        llm.logits([1, 2, 3], rank=1)
        kinds = [{op["kind"] for op in document["ops"]} for document in llm.trace()]
        assert kinds[0] == set() and kinds[1] >= {"copy", "read", "record", "wait", "mark"}
        llm.release()
        llm.setup()
        assert [document["ops"] for document in llm.trace()] == [[], []]
        assert llm.logits([1, 2, 3], rank=0).shape[0] == 3


@pytest.mark.parametrize(
    "options, why", [({"ranks": 2, "replicated": True}, "DWDP is off"), ({"ranks": 1}, "one rank holds everything")]
)
def test_a_trace_of_weights_that_do_not_move_is_refused_before_a_rank_starts(tiny, options, why):
    with pytest.raises(ConfigError, match=f"a trace was asked for, and no weights move: {why}"):
        LLM(tiny, device="cpu", trace=True, **options)


def test_a_folder_that_cannot_be_made_is_refused_before_a_rank_starts(tiny, capsys):
    command = ["generate", "--model", str(tiny), "--device", "cpu", "--ranks", "2", "--quiet", "--prompt", "a"]
    assert run([*command, "--trace", "/dev/null/x"]) == 2
    assert "--trace /dev/null/x cannot be a folder: Not a directory" in capsys.readouterr().err


def test_without_a_trace_there_is_none_to_give():
    class Untraced(LLM):
        def __init__(self):
            self._frontend = type("Frontend", (), {"settings": type("Settings", (), {"trace": False})})

    with pytest.raises(DwdpError, match="make it with trace=True"):
        LLM.trace(Untraced())


def test_the_two_ends_of_a_read_window_are_drawn_as_one_span():
    def op(kind, t0, t1, stream="compute", layer=1):
        return {"stream": stream, "kind": kind, "slot": "E0", "layer": layer, "event": None, "t0": t0, "t1": t1}

    ops = [op("copy", 0, 1, "copy"), op("read", 1, 1.5, "copy"), op("read", 2, 2), op("read", 5, 5.25)]
    ops += [op("copy", 6, 7, "copy", 3), op("read", 8, 8, layer=3), op("read", 9, 9, layer=3)]
    drawn = [event for event in chrome_trace(ops)["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in drawn if event["cat"] == "read"] == [
        ("read E0 layer 1", 1.0, 0.5), ("read E0 layer 1", 2.0, 3.25), ("read E0 layer 3", 8.0, 1.0),
    ]  # fmt: skip
