"""The ranks of an attention-DP instance: their loop, in which every step is a step of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dwdp.executor.create import digest
from dwdp.executor.loop import SimpleLoop
from dwdp.executor.memory import where_joined
from dwdp.executor.messages import RankSettings, WorkItem, WorkResult, one_line
from dwdp.group.tensors import TensorExchange
from dwdp.model.lockstep import LockstepExperts
from dwdp.partition.experts import ExpertPartition


class LockstepLoop(SimpleLoop):
    """SimpleLoop's order of forwards on each rank, one forward of every rank that has one to a step.

    A rank whose own work is done, or that had none, goes on taking part until no rank brings a token; so every rank
    has to be given a call, an empty one where there is nothing to do. A rank that fails ends the step for all: the
    others raise with its reason.
    """

    def __init__(self, *args: Any, step: LockstepExperts, **options: Any) -> None:
        super().__init__(*args, **options)
        self.step = step

    def forward(self, ids: torch.Tensor, state) -> torch.Tensor:
        self.step.begin(ids.numel())
        return super().forward(ids, state)

    def generate(self, items: Sequence[WorkItem], *, logits_sha256: bool = False) -> list[WorkResult]:
        work = super().generate
        return self._together(lambda: work(items, logits_sha256=logits_sha256))

    def logits(self, token_ids: Sequence[int], *, chunk_size: int | None = None, decode: int = 0) -> torch.Tensor:
        work = super().logits
        return self._together(lambda: work(token_ids, chunk_size=chunk_size, decode=decode))

    def _together(self, work: Callable[[], Any]) -> Any:
        try:
            result = work()
            while self.step.begin(0):
                self.step.accompany(self.model.moe_layers())
            return result
        except BaseException as error:
            # The others wait for this rank's part of the step, which will not come.
            self.step.exchange.abort(one_line(error) or type(error).__name__)
            raise


def join_instance(settings: RankSettings, group, where: torch.device) -> tuple[TensorExchange, tuple[int, int]]:
    """Meets the other ranks -> (the exchange of the steps, the experts [start, end) of this rank). Collective.

    where: this rank computes.

    Dense DWDP is no part of what is compared: its ranks have a group of their own.
    """
    from dwdp.model.config import ModelConfig
    from dwdp.model.headers import read_config

    document = read_config(settings.model)
    group.join(
        {
            "attention_dp": settings.ranks,
            "model_config": digest(document),
            "dtype": settings.dtype,
            "allow_shared_device": settings.allow_shared_device,
            **where_joined(None, where),
        }
    )
    partition = ExpertPartition.balanced(settings.ranks, ModelConfig.from_dict(document).num_experts)
    return TensorExchange(group), partition.ranges[group.rank]
