"""Tiny launches in which a field or a switch is seen to change something. Equal runs are made once."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from dwdp.executor.create import RankExecutor, build_rank
from dwdp.executor.messages import RankSettings
from dwdp.executor.settings import Launch, resolve
from dwdp.group.threads import run_rank_threads
from dwdp.runtime.manager import DwdpManager
from dwdp.runtime.setup_experts import outside_bytes
from dwdp.weights.mover import HostMover
from dwdp.weights.verify import RowChecker
from tests.support.system import DENSE, SMALL_PAGES, prompt, write_random

UNSET = object()
"""The value of a field or switch that is not given at all."""

LOCAL: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
ATTACHED = {**LOCAL, "ranks": 2, "dwdp": SMALL_PAGES, "dense_dwdp": DENSE}
EXPERTS = {**LOCAL, "ranks": 2, "dwdp": SMALL_PAGES}
STANDALONE = {**LOCAL, "tp_size": 2, "attention_dp": True, "dense_dwdp": DENSE}
DIVIDED = {**LOCAL, "tp_size": 2, "attention_dp": True}


_folders = contextlib.ExitStack()


@functools.cache
def tiny_model() -> Path:
    """A random checkpoint of seven experts and four MoE layers, kept until `forget`."""
    return write_random(_folder(), num_experts=7)


@functools.cache
def wide_model() -> Path:
    """The same with dense rows of more than 1 MiB."""
    return write_random(_folder(), num_experts=7, hidden_size=256, linear_attn_config={"head_dim": 64})


@functools.cache
def fp8_model() -> Path:
    """As `tiny_model`, with FP8 attention projections."""
    return write_random(_folder(), num_experts=7, fp8_attention=True)


def _folder() -> Path:
    return Path(_folders.enter_context(tempfile.TemporaryDirectory(prefix="dwdp-observed-"))) / "model"


def forget() -> None:
    """Drops the runs and the checkpoints."""
    for kept in (_run, tiny_model, wide_model, fp8_model):
        kept.cache_clear()
    _folders.close()


@dataclass
class RankSeen:
    """One rank behind set-up and two forwards. handles: (what, bytes) of its own. submissions: copies, slices of a
    batch and rows of a gather of one expert layer. copies: (slot, layer) in their order. nan: whether every slot held
    NaN bytes alone at the end of set-up."""

    ledger: dict[str, int]
    counters: dict[str, Any]
    report: dict[str, Any]
    logits: torch.Tensor
    handles: list[tuple[str, int]]
    page_bytes: int
    submissions: tuple[int, int, int] | None
    copies: list[tuple[str, int]]
    nan: bool | None

    @property
    def dense(self) -> dict[str, Any]:
        """The report of dense DWDP."""
        return self.report.get("dense", self.report)


@dataclass
class Run:
    """error: why the ranks failed. checked: rows compared with their owners' checksums, in set-up and beside
    forwards. loaded_bytes: what rank 0's model holds outside shared memory when an attached set-up begins."""

    error: str | None = None
    lines: list[str] = field(default_factory=list)
    ranks: list[RankSeen] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    loaded_bytes: int | None = None


class Asked:
    """A launch that is asked for, and what comes of it. fault: see `FAULTS`."""

    def __init__(self, fields: dict[str, Any], environ: dict[str, str], fault: str | None = None) -> None:
        self.fields, self.environ, self.fault = fields, environ, fault

    @cached_property
    def _resolved(self) -> tuple[Launch | None, str | None, list[str]]:
        fields = {"model": tiny_model} | self.fields
        fields["model"] = fields["model"]()
        with logged() as lines:
            try:
                return resolve(environ=self.environ, **fields), None, lines
            except ValueError as error:
                return None, str(error), lines

    @property
    def launch(self) -> Launch:
        launch, refusal, _ = self._resolved
        assert launch is not None, refusal
        return launch

    @property
    def refusal(self) -> str | None:
        """What is said where no rank may be built."""
        return self._resolved[1]

    @property
    def lines(self) -> list[str]:
        """What is logged before a rank is built."""
        return self._resolved[2]

    @property
    def run(self) -> Run:
        """The ranks' run; one and the same for launches that come to the same settings."""
        return _run(msgspec.msgpack.encode(self.launch.settings), self.fault)

    @property
    def first(self) -> RankSeen:
        """Rank 0 of a run without an error."""
        assert self.run.error is None, self.run.error
        return self.run.ranks[0]


@contextlib.contextmanager
def logged():
    """The lines that the package logs from INFO on."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("dwdp")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _fails(*args):
    raise RuntimeError("injected")


FAULTS = {
    None: contextlib.nullcontext,
    "a gathered blob cannot be compared": lambda: mock.patch.object(HostMover, "first_differences", _fails),
}


@functools.cache
def _run(encoded: bytes, fault: str | None) -> Run:
    settings = msgspec.msgpack.decode(encoded, type=RankSettings)
    run = Run()

    def one(group) -> RankSeen:
        with build_rank(settings, group, rank=0 if group is None else group.rank, trace=True) as rank:
            return _look(rank)

    with logged() as run.lines, counted_checks() as run.checked, seen_loaded(run), FAULTS[fault]():
        try:
            run.ranks = run_rank_threads(settings.ranks, one, timeout=30) if settings.has_group else [one(None)]
        except (ValueError, RuntimeError) as error:
            run.error = str(error)
    return run


def _look(rank: RankExecutor) -> RankSeen:
    manager = rank.manager
    nan = _all_nan(manager)
    logits = rank.logits(prompt(0, 8), chunk_size=4)
    report, experts = rank.report(), getattr(manager, "experts", None)
    submissions = None
    if experts is not None and experts.plans:
        plan = experts.plans[0]
        submissions = len(plan.slices), len(plan.batch), len(plan.gather.rows) if plan.gather else 0
    copies = [op for op in rank.device.trace if op["kind"] == "copy"] if rank.device is not None else []
    handles = list(rank.domain._handles.values()) if rank.domain is not None else []
    return RankSeen(
        ledger=report["ledger"],
        counters=report["counters"],
        report=getattr(manager, "report", None) or {},
        logits=logits,
        handles=[(handle.what, handle.nbytes) for handle in handles if not handle.imported],
        page_bytes=rank.domain.page_bytes if rank.domain is not None else 0,
        submissions=submissions,
        copies=[(op["slot"], op["layer"]) for op in copies],
        nan=nan,
    )


def _all_nan(manager) -> bool | None:
    dense = getattr(manager, "dense", manager)
    weights = getattr(dense, "weights", None)
    if weights is None or not weights.slots.slots:
        return None
    return all(bool((slot.data == 0xFF).all()) for slot in weights.slots.slots.values())


def seen_loaded(run: Run):
    setup = DwdpManager.setup

    def seeing(manager, model):
        if manager.group is not None and manager.group.rank == 0:
            run.loaded_bytes = outside_bytes(model, manager.domain)
        return setup(manager, model)

    return mock.patch.object(DwdpManager, "setup", seeing)


@contextlib.contextmanager
def counted_checks():
    counts = {"set-up": 0, "beside forwards": 0}
    compare, lock = RowChecker.compare, threading.Lock()

    def counting(checker, pos, sums, *arguments, **options):
        compare(checker, pos, sums, *arguments, **options)
        in_rank = threading.current_thread().name.startswith("dwdp-rank-")
        with lock:
            counts["set-up" if in_rank else "beside forwards"] += len(sums)

    with mock.patch.object(RowChecker, "compare", counting):
        yield counts
