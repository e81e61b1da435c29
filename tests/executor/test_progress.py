"""Bars on a terminal say how fast bytes are read and how long it still takes; elsewhere nothing is written."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dwdp.executor.progress import ProgressBars, amount


def test_bytes_have_a_rate_and_a_time_left_and_other_units_are_counted():
    assert amount(1.5e9, 6e9, 2.25e9, 62, True) == "1.50/6.00 GB  2.25 GB/s  1:02 left"
    assert amount(0, 6e9, None, None, True) == "0.00/6.00 GB"
    assert amount(0, 1, 3.0, 4.0, False) == "0/1"


@pytest.mark.parametrize("stage, expected", [("load", "0.50/2.00 GB"), ("update", "0.50/2.00 GB"), ("setup", "/")])
def test_a_terminal_shows_them(stage, expected):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with ProgressBars(quiet=False, console=console) as bars:
        bars.update(1, stage, 0, int(2e9))
        bars.update(1, stage, int(5e8), int(2e9))
    shown = console.file.getvalue()
    assert f"rank 1: {stage}" in shown and expected in shown and ("GB" in shown) == (stage != "setup")


@pytest.mark.parametrize("quiet, terminal", [(True, True), (False, False)])
def test_quiet_and_what_is_no_terminal_show_nothing(quiet, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with ProgressBars(quiet=quiet, console=console) as bars:
        bars.update(0, "load", 1, 2)
    assert console.file.getvalue() == ""
