"""For all tests: what one leaves behind is no other's."""

from __future__ import annotations

import gc
import glob
import logging
import os
import resource
import sys
from pathlib import Path

import hypothesis
import pytest

if not glob.glob("/dev/nvidia[0-9]*"):
    # Kernels are made for Triton's interpreter when their module is imported; no launch of ours takes them on the host
    # unless DWDP_KERNELS=triton says so.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Before torch is imported. Files that run side by side and the ranks of a test share the cores already: with a team
    # of threads in each process they spin for each other at every small product. Ranks set the size of theirs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)
_setrlimit = resource.setrlimit


def setrlimit_but_for_mlx_lm(which, limits):
    """mlx_lm sets the descriptor limits of the process that imports it to 2,048 and 4,096, whatever they were."""
    if not sys._getframe(1).f_globals.get("__name__", "").startswith("mlx_lm"):
        _setrlimit(which, limits)


resource.setrlimit = setrlimit_but_for_mlx_lm

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is no failure
hypothesis.settings.load_profile("any machine")


def pytest_collection_finish():
    """Collections of garbage, of which set-up and many tests make some, need not go through all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_before():
    """Commands that run in this process take the package's log over; tests of the log need it back."""
    logger = logging.getLogger("dwdp")
    before = logger.propagate, logger.level, list(logger.handlers)
    yield
    logger.propagate, logger.level, logger.handlers = before


def mapped_memory() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:dwdp-" in line]


@pytest.fixture(autouse=True)
def no_memory_left(request):
    """A test that leaves memory of a domain mapped fails itself, not a later one that counts."""
    yield
    if mapped_memory():
        gc.collect()
        left = mapped_memory()
        assert not left, f"{request.node.nodeid} leaves memory mapped: {left[:3]}"


@pytest.fixture(scope="session")
def warm_start():
    """`with warm_start():` - rank processes of an `LLM` made there are forks, see tests/support/warm.py."""
    from tests.support.warm import Nursery

    with Nursery() as nursery:
        yield nursery.starting


@pytest.fixture(scope="module")
def warm_ranks(warm_start):
    """For a file all of whose `LLM`s may be started so."""
    with warm_start():
        yield
