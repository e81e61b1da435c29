"""Tests of this folder need an NVIDIA GPU; without one they are skipped by their mark."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items):
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed > devices:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {devices}"))
