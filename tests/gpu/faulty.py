"""Set-ups of expert and dense DWDP that fail in one call on one rank, many in the same two processes.

What must hold each time: both ranks raise, or both serve with the right logits where a fault may be passed over; what
is left of the model is what it was, or a model that says why it cannot run; the driver has got back everything that it
gave out; descriptors and the GPU's memory are as before.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from dwdp.errors import ModelUnusableError
from dwdp.model import loader
from tests.gpu.calls import STEPS, Calls
from tests.gpu.ranks import Site
from tests.support.system import DENSE, prompt

DRIVER = (
    "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemAlloc", "cuMemHostAlloc", "cuMemGetInfo",
    "cuMemGetAllocationGranularity", "cuDevicePrimaryCtxRetain", "cuDeviceGetUuid", "cuDeviceGetAttribute",
    "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel", "cuMemsetD8Async",
    "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate",
    "cuGraphLaunch", "cuStreamCreateWithPriority", "cuStreamSynchronize", "cuCtxSynchronize",
    "cuEventCreate", "cuEventRecord", "cuEventSynchronize",
)  # fmt: skip
DENSE_PART = (
    "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemcpyDtoH", "cuMemAlloc", "cuLaunchKernel",
    "cuMemImportFromShareableHandle", "cuStreamSynchronize", "checksum", "first_difference", "value_bytes",
)  # fmt: skip
PASSED_OVER = {
    # a type of handles that does not work is not taken, and a refused read-only map is a writable one
    "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle", "cuMemcpyHtoD", "cuMemcpyDtoH",
    "cuCtxSynchronize",  # before an unmap, whose error is told by whoever waits for the work
}  # fmt: skip
MODES = {
    "handles": {"dwdp": {"prefetch_gather": True, "verify_every": 2}},  # loaded straight into handles
    "plain": {"dwdp": {"contention_opt": True}},  # loaded as it is, and put back
    "optional": {"dwdp": {"verify_every": 2}, "dense": {**DENSE, "required": False}},  # dense DWDP may be given up
}
SLACK = 32 << 20
"""Bytes that the whole run may keep: a kernel of torch's stays loaded once it was used, also by a path of failures. A
granule (2 MiB) that every failure leaked would be several times as much; the driver's own things are counted exactly.
"""


@dataclass(frozen=True)
class Case:
    """The `which`-th of `of` chosen calls of `point` fails on rank `failing`."""

    mode: str
    point: str
    which: int
    of: int
    failing: int

    def number(self, counts: dict[str, int], first: int = 0) -> int:
        """Of the call, of counts[point] calls, those behind the `first` first ones; the middle one of one."""
        count = counts.get(self.point, 0) - first
        return first + ((count + 1) // 2 if self.of == 1 else 1 + round(self.which * (count - 1) / (self.of - 1)))

    def __str__(self) -> str:
        return f"{self.mode}: {self.point} {self.which + 1} of {self.of} on rank {self.failing}"


def chosen(depth: int, counts: dict[str, dict[str, int]], ranks: int) -> list[Case]:
    """depth: calls of a point that fail in turn, from the first to the last; collectives all. counts: by mode."""
    found = []
    for number, point in enumerate((*STEPS, *DRIVER)):
        for failing in range(ranks):
            modes = [mode for mode in ("handles", "plain") if counts[mode].get(point)]
            for at, mode in enumerate(modes):
                if depth == 1 and at != (number + failing) % len(modes):
                    continue  # the other mode has it on the other rank
                count = counts[mode][point]
                of = min(count, 99 if depth > 1 and point == "allgather" else depth)
                found += [Case(mode, point, which, of, failing) for which in range(of)]
    found += [Case("optional", point, 0, 1, failing) for point in DENSE_PART for failing in range(ranks)]
    return sorted(found, key=lambda case: case.which)  # what a short budget leaves out are further calls of a point


class Faulty:
    """One rank's part."""

    def __init__(self, site: Site, model: Path) -> None:
        self.site, self.model = site, model
        self.counts: dict[str, Calls] = {}
        self.ends: Counter[str] = Counter()  # how set-ups ended
        # A fault in what the front end asks the GPU would be met before there is a group that tells the other rank.
        self.settings = {mode: site.settings(model, **options) for mode, options in MODES.items()}
        with site.replicated(model) as rank:
            self.expected = rank.logits(prompt(0, 8))

    def clean(self, mode: str) -> Calls:
        with Calls() as calls:
            outcome = self.set_up(mode, calls)
        assert outcome.error is None, outcome.text
        assert outcome.right and outcome.problem is None, outcome
        self.counts[mode] = calls
        return calls

    def set_up(self, mode: str, calls: Calls) -> Outcome:
        """One set-up and, where it comes to its end, one answer."""
        held = {}
        real = loader.load_model

        def load(*args, built=None, **named):
            model = held["model"] = real(*args, built=None if mode == "plain" else built, **named)
            held["before"] = fingerprint(model)
            return model

        loader.load_model = load
        try:
            with self.site.shared(self.model, settings=self.settings[mode]) as rank:
                calls.until_set_up = calls.counts.copy()
                status = rank.manager.report["dense"]["status"]
                self.ends[f"dense {status}"] += 1
                right = torch.equal(rank.logits(prompt(0, 8)), self.expected)
                return Outcome(None, "", right, status, None)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            problem = what_is_wrong(**held) if held else None
            self.ends["no model" if not held else "unusable" if held["model"].unusable else "restored"] += 1
            return Outcome(type(error).__name__, str(error), False, None, problem)
        finally:
            loader.load_model = real

    def fail(self, case: Case) -> list[str]:
        """What did not hold on this rank."""
        before = descriptors()
        clean = self.counts[case.mode]
        counts, first = clean.until_set_up, 0
        if case.mode == "optional":
            counts, first = clean.dense[1], clean.dense[0][case.point]
        fault = (case.point, case.number(counts, first)) if case.failing == self.site.rank else (None, 0)
        with Calls(*fault) as calls:
            outcome = self.set_up(case.mode, calls)
        gc.collect()
        wrong = [] if calls.fired == (fault[0] is not None) else [f"the fault was met {calls.fired} times"]
        if calls.left:
            wrong.append(f"the driver has not got back {calls.left}")
        if descriptors_again(before) != before:
            wrong.append(f"{descriptors()} descriptors, {before} before")
        if outcome.problem:
            wrong.append(outcome.problem)
        verdicts = self.site.agree([outcome.error, outcome.text, outcome.status])
        raised = [error is not None for error, _, _ in verdicts]
        if len(set(raised)) > 1:
            wrong.append(f"verdicts differ: {verdicts}")
        elif not raised[0]:
            if not outcome.right:
                wrong.append("the logits of the set-up that went on are wrong")
            if case.mode == "optional" and case.point not in PASSED_OVER and outcome.status != "abandoned":
                wrong.append(f"dense DWDP is {outcome.status}")
            if case.mode != "optional" and case.point not in PASSED_OVER:
                wrong.append("nobody raised")
        elif self.site.rank != case.failing and not named(case, outcome.text):
            wrong.append(f"the error does not name rank {case.failing}: {outcome.text}")
        return wrong


@dataclass(frozen=True)
class Outcome:
    """error: what set-up raised, its class. right: whether the logits were; problem: of what is left of the model."""

    error: str | None
    text: str
    right: bool
    status: str | None
    problem: str | None


def named(case: Case, text: str) -> bool:
    return f"rank {case.failing}" in text or f"{case.point} " in text


def fingerprint(model) -> dict[str, torch.Tensor]:
    """Every tensor of the model, on the host."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for number, layer in enumerate(model.moe_layers()):
        for name, tensor in {**layer.expert_tables(), **layer.small_tensors()}.items():
            found[f"experts {number} {name}"] = tensor
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


def what_is_wrong(model, before: dict[str, torch.Tensor]) -> str | None:
    """A model whose set-up failed is as it was, or refuses to run."""
    if model.unusable is not None:
        with contextlib.suppress(ModelUnusableError):
            model(torch.zeros((1, 1), dtype=torch.long), None)
            return "an unusable model runs"
        return None
    after = fingerprint(model)
    changed = [name for name in before if name not in after or not same(after[name], before[name])]
    return f"tensors were not restored: {changed[:5]}" if changed else None


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def descriptors_again(before: int, seconds: float = 3.0) -> int:
    """Once they are as before, or the time has passed: threads that watch peers end a moment after their group."""
    end = time.monotonic() + seconds
    while descriptors() != before and time.monotonic() < end:
        time.sleep(0.01)
    return descriptors()


def every_step(site: Site, model: Path, depth: int, seconds: float, of_many: int = 1) -> dict:
    """One failure at a time -> {wrong, skipped (cases that the time was too short for), cases, ends, left_bytes}.

    of_many: only every so-many-th case, for a try.
    """
    began = time.monotonic()
    logging.getLogger("dwdp").setLevel(logging.CRITICAL)  # every failure is told by every rank
    faulty = Faulty(site, model)
    for mode in MODES:
        faulty.clean(mode)
    counts = {mode: dict(site.agree(dict(calls.until_set_up))[0]) for mode, calls in faulty.counts.items()}
    before = site.settled_bytes()
    cases, wrong, skipped, left = chosen(depth, counts, site.size)[::of_many], [], [], 0
    for number, case in enumerate(cases):
        if any(site.agree(time.monotonic() - began > seconds)):
            skipped = [str(case) for case in cases[number:]]
            break
        found = faulty.fail(case)
        left = before - site.settled_bytes()
        if left > SLACK:
            found.append(f"{left} bytes of the GPU's memory are not back")
        wrong += [f"{case}: {problem}" for problem in found]
        if site.rank == 0:
            print(
                f"{time.monotonic() - began:6.1f} s  {number + 1}/{len(cases)} {case}: {found or 'right'}", flush=True
            )
    faulty.clean("handles")
    ran = len(cases) - len(skipped)
    return {"wrong": wrong, "skipped": skipped, "cases": ran, "ends": dict(faulty.ends), "left_bytes": left}
