"""For all tests: what one sets up in logging is no other's."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def logging_as_before():
    """Commands that run in this process take the package's log over; tests of the log need it back."""
    logger = logging.getLogger("dwdp")
    before = logger.propagate, logger.level, list(logger.handlers)
    yield
    logger.propagate, logger.level, logger.handlers = before
