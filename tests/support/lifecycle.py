"""The whole life of attached DWDP on one rank as text: what it agrees with its peer, and what each hook enqueues.

`python -m tests.support.lifecycle` writes tests/data/attached_lifecycle.txt anew; `--check` compares.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from dwdp.executor.create import build_rank
from dwdp.executor.settings import resolve
from dwdp.group.threads import run_rank_threads
from tests.support.system import DENSE, SMALL_PAGES, prompt, write_random

GOLDEN = Path(__file__).parent.parent / "data" / "attached_lifecycle.txt"
ABORTED = 2  # the covered layer whose experts fail once, between bind and finish
HEADLINES = ("start", "H0", "H1", "H2", "bind", "finish", "H3", "end", "abort", "barrier")


class Aborted(Exception):
    """What the model fails with once."""


def record() -> str:
    """Two ranks live through it in threads; rank 0's account."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_random(Path(folder) / "model")
        settings = resolve(
            model, ranks=2, dtype="float32", device="cpu", dwdp={**SMALL_PAGES, "verify_every": 0}, dense_dwdp=DENSE
        ).settings
        return run_rank_threads(2, lambda group: _live(group, settings), timeout=60.0)[0]


def _live(group, settings) -> str:
    lines: list[str] = []
    run = group._run

    def noted(tag, *args, **named):
        lines.append(f"  all ranks: {tag}")
        return run(tag, *args, **named)

    group._run = noted
    lines.append("setup")
    with build_rank(settings, group, rank=group.rank, trace=True) as rank:
        trace, manager = rank.device.trace, rank.manager
        gathered = [op for op in trace if op["kind"] == "copy"]
        lines.append(f"  copies behind P3, each compared with the originals: {_text(gathered)[0].strip()}")
        for title in ("the first forward", "the second forward"):
            lines += _part(title, trace, lambda: _forward(rank))
        lines += _part("a forward that fails inside moe(2)", trace, lambda: _fail(rank))
        lines += _part("the forward that recovers", trace, lambda: _forward(rank))
        lines.append("teardown")
        manager.release()
    return "\n".join(lines) + "\n"


def _forward(rank) -> None:
    ids = torch.tensor([prompt(0, 5)])
    rank.loop.forward(ids, rank.model.new_state(1, 5))


def _fail(rank) -> None:
    def fail(*_):
        rank.device.mark("abort", ABORTED)
        raise Aborted

    runtime = rank.manager.experts
    finish = runtime.finish
    runtime.finish = lambda pos: fail() if pos == ABORTED else finish(pos)
    try:
        _forward(rank)
    except Aborted:
        runtime.finish = finish


def _part(title: str, trace: list[dict], body) -> list[str]:
    before = len(trace)
    body()
    return [title, *_text(trace[before:])]


def _text(ops: list[dict]) -> list[str]:
    """A line a hook: what compute waits for, which read windows end, which copies are enqueued."""
    lines: list[tuple[str, list[str]]] = []
    for op in ops:
        kind, slot, layer = op["kind"], op["slot"], op["layer"]
        if kind == "mark":
            if op["name"] in HEADLINES:
                lines.append((op["name"] if layer is None else f"{op['name']}({layer})", []))
            continue
        if not lines:
            lines.append(("", []))
        words = lines[-1][1]
        if kind == "copy":
            word = f"{'E' if slot[0] == 'E' else 'L'}({layer})"
            words += [word] if word[0] == "E" or word not in words else []
        elif kind == "sync":
            words.append("the host waits for the device")
        elif kind == "wait" and op["stream"] == "compute" and slot is not None:
            words.append(f"waits for {slot}")
        elif kind == "record" and op["stream"] == "compute" and slot is not None:
            words.append(f"has read {slot}")
    return [f"  {head:<10} {', '.join(words)}".rstrip() for head, words in lines]


def main(arguments: list[str]) -> int:
    text = record()
    if arguments == ["--check"]:
        same = GOLDEN.read_text() == text
        print(f"{GOLDEN.name}: {'as recorded' if same else 'differs; run python -m tests.support.lifecycle'}")
        return 0 if same else 1
    GOLDEN.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
