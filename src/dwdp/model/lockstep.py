"""Routed experts divided over ranks that step together: attention and router are each rank's own, experts are not.

[Note: a step] A step begins with one exchange of how many tokens each rank brings. In each MoE layer every rank
then gets the tokens of all, computes what its own experts contribute to them, and hands each rank its rows. A rank
without tokens does that for the others and runs nothing else: no attention, no hook, no copy of dense weights.

[Note: the order of a sum] What the experts of rank 0 contributed to a token comes first, then rank 1's, and so on,
in float32. The same tokens in the same steps therefore give the same bits, whoever finishes first. Replicated
weights add the same numbers in another order: results are equal within rounding and not bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dwdp.errors import GroupError
from dwdp.model.norms import wide

if TYPE_CHECKING:
    from dwdp.group.tensors import TensorExchange
    from dwdp.model.moe import RoutedExperts


class LockstepExperts:
    """The MoE layers of one rank's model, which compute together with the other ranks'.

    layers: every RoutedExperts of the model, each with this rank's rows; this object is set in all of them, as
    `lockstep`.
    """

    def __init__(self, exchange: TensorExchange, layers: Sequence[RoutedExperts]) -> None:
        self.exchange = exchange
        self.rank = exchange.group.rank
        self.counts: list[int] = []
        self._steps = 0
        for layer in layers:
            layer.lockstep = self

    def begin(self, num_tokens: int) -> bool:
        """Agrees on the next step. num_tokens: that this rank brings, 0 for none -> whether any rank brings some.

        Where none does there is no step; every rank learns that in the same call.
        """
        found = self.exchange.all_gather(torch.tensor([self._steps, num_tokens], dtype=torch.int64))
        steps = [int(one[0]) for one in found]
        if len(set(steps)) > 1:
            listed = ", ".join(f"rank {rank}: {step}" for rank, step in enumerate(steps))
            raise GroupError(f"the attention-DP ranks are in different steps ({listed})")
        self._steps += 1
        self.counts = [int(one[1]) for one in found]
        return any(self.counts)

    def accompany(self, layers: Sequence[RoutedExperts]) -> None:
        """This rank's part of a step to which it brings no token. layers: of the model, in model order."""
        for experts in layers:
            nothing = experts.w2.new_empty((0, experts.width), dtype=experts.dtype)
            ids = experts.w2.new_empty((0, experts.top_k), dtype=torch.int64)
            self.routed(experts, nothing, ids, ids.to(wide(experts.dtype)))

    def routed(self, experts: RoutedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x: [n, width], ids, weights: [n, k] of this rank's n tokens -> fp32 [n, width], as RoutedExperts.forward."""
        if len(self.counts) <= self.rank or x.shape[0] != self.counts[self.rank]:
            announced = self.counts[self.rank] if self.counts else 0
            raise GroupError(f"rank {self.rank} brings {x.shape[0]} tokens to a step that began with {announced}")
        packed = self.exchange.all_gather(_packed(x, ids, weights, max(self.counts)))
        mine = experts.contributions(*_split(packed, self.counts, x, ids, weights))
        parts = self.exchange.all_to_all(mine, self.counts)
        total = parts[0]  # [Note: the order of a sum]
        for part in parts[1:]:
            total = total + part
        return total


def _packed(x: Tensor, ids: Tensor, weights: Tensor, num_rows: int) -> Tensor:
    """uint8 [num_rows, bytes of a token]: one exchange carries all three, and the rows behind the last stay zero."""
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in (x, ids, weights)], 1)
    packed = rows.new_zeros((num_rows, rows.shape[1]))
    packed[: rows.shape[0]] = rows
    return packed


def _split(packed: Sequence[Tensor], counts: Sequence[int], *like: Tensor) -> list[Tensor]:
    """The tokens of all ranks, in rank order: tensors with the dtypes and widths of `like`."""
    rows = torch.cat([part[:count] for part, count in zip(packed, counts)])
    widths = [one.shape[1] * one.element_size() for one in like]
    # copies: a column of bytes begins where no wider value may, and a single row of it already counts as contiguous
    parts = (part.clone(memory_format=torch.contiguous_format) for part in rows.split(widths, 1))
    return [part.view(one.dtype) for part, one in zip(parts, like)]
