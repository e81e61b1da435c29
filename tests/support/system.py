"""Whole ranks in threads of one process: checkpoint -> build_rank -> body, with DWDP on or replicated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dwdp.executor.create import RankExecutor, build_rank
from dwdp.executor.settings import resolve
from dwdp.group.threads import run_rank_threads
from dwdp.model.writer import random_checkpoint
from tests.support.tiny import tiny_config_dict

DENSE = {"enabled": True, "min_bytes": 1}
STANDALONE = {**DENSE}
SMALL_PAGES = {"host_granule_bytes": 4096, "page_granules": 2}


def write_random(
    folder: Path, *, seed: int = 3, expert_format: str = "plain", fp8_attention: bool = False, **changes
) -> Path:
    """A random checkpoint of the tiny five-layer Kimi-K3 with `changes` in its config."""
    random_checkpoint(
        folder, tiny_config_dict(**changes), seed=seed, expert_format=expert_format, fp8_attention=fp8_attention
    )
    return folder


def prompt(rank: int, length: int, vocab: int = 320) -> list[int]:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def replicated(model: Path, body: Callable[[RankExecutor], Any], *, dtype: str = "float32", **build) -> Any:
    """body(rank) on one rank that holds everything."""
    settings = resolve(model, ranks=1, dtype=dtype, device="cpu").settings
    with build_rank(settings, **build) as rank:
        return body(rank)


def shared(
    model: Path,
    n: int,
    body: Callable[[RankExecutor], Any],
    *,
    dwdp: dict | None = None,
    dense: dict | None = DENSE,
    dtype: str = "float32",
    timeout: float = 90.0,
    **build,
) -> list[Any]:
    """body(rank) on every one of n ranks that share the weights; -> what each returned."""
    settings = resolve(
        model, ranks=n, dtype=dtype, device="cpu", dwdp={**SMALL_PAGES, **(dwdp or {})}, dense_dwdp=dense
    ).settings

    def run(group):
        with build_rank(settings, group, rank=group.rank, **build) as rank:
            return body(rank)

    return run_rank_threads(n, run, timeout=timeout)


def lockstep(
    model: Path,
    n: int,
    body: Callable[[RankExecutor], Any],
    *,
    dense: dict | None = None,
    dtype: str = "float32",
    timeout: float = 90.0,
    settings_of: Callable[[int, Any], Any] = lambda rank, settings: settings,
    **build,
) -> list[Any]:
    """body(rank) on every one of n ranks of an attention-DP instance; -> what each returned.

    dense: the dense_dwdp section, standalone. settings_of: (rank, settings) -> the settings of that rank.
    """
    settings = resolve(
        model, tp_size=n, attention_dp=True, dtype=dtype, device="cpu", dense_dwdp=dense, environ={}
    ).settings

    def run(group):
        with build_rank(settings_of(group.rank, settings), group, rank=group.rank, **build) as rank:
            return body(rank)

    return run_rank_threads(n, run, timeout=timeout)
