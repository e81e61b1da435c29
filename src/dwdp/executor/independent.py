"""One of N processes that nobody of ours started: the process is itself a rank, and the group meets in a
store or, under an MPI launcher without one, over MPI."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from dwdp.env import RankPlace
from dwdp.errors import RankDiedError
from dwdp.executor.create import build_rank, independent_group, mpi_group
from dwdp.executor.prompts import prepare, request_output
from dwdp.executor.request import RequestOutput, SamplingParams
from dwdp.executor.settings import Launch

logger = logging.getLogger(__name__)


def run_rank(
    launch: Launch,
    place: RankPlace,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    logits_sha256: bool = False,
) -> tuple[list[tuple[int, RequestOutput]], list[dict], list[dict]]:
    """Completes this rank's share of the prompts, i mod N, and leaves the group with the others.

    -> ((index among all prompts, answer) of its own, [its report], [its trace] as `LLM.trace` gives it where one is
    kept). Raises RankDiedError when a rank of the group was lost on the way: this one could go on, but the run as a
    whole has failed.
    """
    import torch

    texts, items = prepare(launch, prompts, params)
    settings = launch.settings
    if place.has_store:
        settings = msgspec.structs.replace(settings, store_host=place.master_addr, store_port=place.master_port)
    torch.set_num_threads(max(1, settings.cores // settings.ranks))
    group = None
    if settings.has_group and not place.has_store:
        group = mpi_group(settings, place.rank)
    elif settings.has_group:
        group = independent_group(settings, place.rank, store_exists=place.store_exists)

    def stop_when_a_rank_died() -> None:
        dead = sorted(group.dead) if group is not None else []
        if dead:
            raise RankDiedError(dead[0], f"rank {dead[0]} died")

    with build_rank(settings, group, rank=place.rank) as executor:
        executor.loop.before_forward = stop_when_a_rank_died
        mine = items[place.rank :: settings.ranks]
        results = executor.generate(mine, logits_sha256=logits_sha256)
        report = executor.report()
        traces = [{"rank": place.rank, "ops": executor.trace()}] if settings.trace else []
    stop_when_a_rank_died()
    outputs = [
        (item.index, request_output(launch.tokenizer, texts[item.index], item, result, place.rank))
        for item, result in zip(mine, results)
    ]
    return outputs, [report], traces


REFUSAL_SECONDS = 10.0


def tell_refusal(place: RankPlace, reason: str) -> None:
    """Tells the other processes that this one refuses the launch before there is a group.

    Over MPI only: without it they would wait in MPI_Init, where nobody could be named; at a store the deadline
    names who is missing. Never raises.
    """
    if place.has_store:
        return
    from dwdp.group.mpi import MpiGroup
    from dwdp.group.mpi_world import mpi_world

    try:
        mpi_world(REFUSAL_SECONDS)
        with MpiGroup() as group:
            group.abort(reason)
    except Exception as error:
        logger.debug("the other processes could not be told: %s", error)
