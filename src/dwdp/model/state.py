"""What a sequence carries from one forward to the next: KDA conv rows and state, MLA latent rows.

[Note: a forward commits at its end] Layers read the state as it was before the forward and leave their new
KDA values as pending; MLA rows are written beyond the counted length. `ModelState.commit` makes both count,
after the last layer. A forward that raises therefore leaves every sequence as it was, and can be run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dwdp.kernels.batch import PackedBatch
from dwdp.kernels.flash_mla import padded
from dwdp.model.config import ModelConfig
from dwdp.model.norms import wide


class KdaState:
    """Of one KDA layer. conv: last raw rows [B, kernel - 1, 3 * width]; recurrent: fp32 [B, heads, K, V]."""

    def __init__(self, conv: Tensor, recurrent: Tensor) -> None:
        self.conv, self.recurrent = conv, recurrent
        self.pending: tuple[Tensor, Tensor] | None = None

    def read(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """conv and recurrent of the batch's sequences, in its order."""
        if batch.in_order:
            return self.conv, self.recurrent
        return self.conv.index_select(0, batch.slot_index), self.recurrent.index_select(0, batch.slot_index)

    def commit(self, batch: PackedBatch | None = None) -> None:
        """batch: whose sequences are pending; None for all of the state."""
        if self.pending is None:
            return
        (conv, recurrent), self.pending = self.pending, None
        if batch is None or batch.in_order:
            self.conv, self.recurrent = conv, recurrent
        else:
            self.conv.index_copy_(0, batch.slot_index, conv)
            self.recurrent.index_copy_(0, batch.slot_index, recurrent)


class MlaState:
    """Of one MLA layer. rows: [B, capacity, latent + rope], of which the first `lengths[b]` count; there may be more of
    them than the state has room for, see `dwdp.kernels.flash_mla.padded`."""

    def __init__(self, rows: Tensor, lengths: list[int]) -> None:
        self.rows, self.lengths = rows, lengths

    def append(self, rows: Tensor) -> Tensor:
        """Write rows [B, T, width] behind each sequence's own -> [B, max(length) + T, width], padded."""
        batch, num_new, _ = rows.shape
        if len(set(self.lengths)) == 1:
            self.rows[:, self.lengths[0] : self.lengths[0] + num_new] = rows
        else:
            start = torch.tensor(self.lengths, device=rows.device)[:, None]
            at = start + torch.arange(num_new, device=rows.device)
            self.rows[torch.arange(batch, device=rows.device)[:, None], at] = rows
        return self.rows[:, : max(self.lengths) + num_new]

    def append_packed(self, rows: Tensor, batch: PackedBatch) -> None:
        """Write packed rows [N, width] behind each sequence's own."""
        self.rows[batch.slot_index[batch.token_sequences], batch.token_positions] = rows


class ModelState:
    """State of B sequences, of equal or different lengths. `lengths`: tokens seen by each sequence.

    Build it with `KimiK3Model.new_state`, join sequences with `stack`, take some out with `select`.
    """

    def __init__(
        self,
        kda: dict[int, KdaState],
        mla_rows: dict[int, Tensor],
        lengths: Sequence[int],
        capacity: int,
    ) -> None:
        self.lengths = list(lengths)
        self.capacity = capacity
        self._open = False  # a forward began and has not committed
        self.layers: dict[int, KdaState | MlaState] = dict(kda)
        # The MLA layers share the list object of the lengths, so that a commit moves all of them at once.
        self.layers.update({i: MlaState(rows, self.lengths) for i, rows in mla_rows.items()})

    @classmethod
    def zeros(
        cls, config: ModelConfig, batch: int, capacity: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> ModelState:
        """Empty state of `batch` sequences with room for `capacity` tokens each."""
        linear = config.linear_attn_config
        kda, mla = {}, {}
        for i in range(config.num_hidden_layers):
            if config.layer_kind(i) == "kda":
                conv = (batch, linear.short_conv_kernel_size - 1, 3 * linear.width)
                recurrent = (batch, linear.num_heads, linear.head_dim, linear.head_dim)
                kda[i] = KdaState(
                    torch.zeros(conv, dtype=dtype, device=device),
                    torch.zeros(recurrent, dtype=wide(dtype), device=device),
                )
            else:
                width = config.mla_cache_width
                shape = (batch, padded(capacity, width, dtype, device), width)
                mla[i] = torch.zeros(shape, dtype=dtype, device=device)
        return cls(kda, mla, [0] * batch, capacity)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the state."""
        return sum(t.nbytes for layer in self.layers.values() for t in _tensors(layer))

    def begin(self, batch: int, num_new: int) -> None:
        """Check that `num_new` tokens for each of `batch` sequences fit; drop what an aborted forward left.

        Raises ValueError with the numbers.
        """
        if batch != self.batch:
            raise ValueError(f"the state holds {self.batch} sequences but the batch has {batch}")
        self._begin(max(self.lengths), num_new)

    def begin_packed(
        self, lengths: Sequence[int], slots: Sequence[int] | None, device: torch.device | str
    ) -> PackedBatch:
        """As `begin`, for the sequences in `slots` with `lengths` new tokens each -> the batch. slots: None for
        0, 1, ...

        Raises ValueError with the numbers.
        """
        slots = tuple(range(len(lengths))) if slots is None else tuple(slots)
        starts = [self.lengths[slot] if 0 <= slot < self.batch else 0 for slot in slots]
        batch = PackedBatch.of(lengths, starts=starts, slots=slots, state_batch=self.batch, device=device)
        self._begin(*max(zip(batch.starts, batch.lengths), key=sum))
        return batch

    def _begin(self, longest: int, num_new: int) -> None:
        if longest + num_new > self.capacity:
            raise ValueError(
                f"the state has room for {self.capacity} tokens a sequence; the longest has "
                f"{longest} and {num_new} more were asked for"
            )
        if self._open:
            self._discard()
        self._open = True

    def _discard(self) -> None:
        for layer in self.layers.values():
            if isinstance(layer, KdaState):
                layer.pending = None
            else:
                # Rows beyond a length are masked, but a NaN there would pass the mask (0 * NaN).
                for b, length in enumerate(self.lengths):
                    layer.rows[b, length:].zero_()

    def commit(self, num_new: int) -> None:
        """Make the tokens of a completed forward count; see [Note: a forward commits at its end]."""
        self._commit([n + num_new for n in self.lengths], None)

    def commit_packed(self, batch: PackedBatch) -> None:
        """As `commit`, for the sequences of the batch."""
        lengths = list(self.lengths)
        for slot, num_new in zip(batch.slots, batch.lengths):
            lengths[slot] += num_new
        self._commit(lengths, batch)

    def _commit(self, lengths: list[int], batch: PackedBatch | None) -> None:
        for layer in self.layers.values():
            if isinstance(layer, KdaState):
                layer.commit(batch)
        self.lengths[:] = lengths
        self._open = False

    @staticmethod
    def stack(states: Sequence[ModelState], capacity: int | None = None) -> ModelState:
        """Join states into one of all their sequences (copies); capacity None: the largest one's."""
        if not states:
            raise ValueError("no state to stack")
        lengths = [n for state in states for n in state.lengths]
        capacity = max(state.capacity for state in states) if capacity is None else capacity
        if capacity < max(lengths):
            raise ValueError(f"capacity {capacity} is below the longest sequence, {max(lengths)} tokens")
        kda, mla = {}, {}
        for i, layer in states[0].layers.items():
            parts = [state.layers[i] for state in states]
            if isinstance(layer, KdaState):
                kda[i] = KdaState(torch.cat([p.conv for p in parts]), torch.cat([p.recurrent for p in parts]))
            else:
                width, dtype, device = layer.rows.shape[-1], layer.rows.dtype, layer.rows.device
                rows = layer.rows.new_zeros(len(lengths), padded(capacity, width, dtype, device), width)
                at = 0
                for p in parts:
                    used = min(p.rows.shape[1], capacity)
                    rows[at : at + p.rows.shape[0], :used] = p.rows[:, :used]
                    at += p.rows.shape[0]
                mla[i] = rows
        return ModelState(kda, mla, lengths, capacity)

    def select(self, sequences: Sequence[int]) -> ModelState:
        """State of the named sequences only, in that order (a copy)."""
        if not sequences:
            raise ValueError("no sequence to select")
        kda, mla = {}, {}
        for i, layer in self.layers.items():
            if isinstance(layer, KdaState):
                at = torch.tensor(list(sequences), device=layer.conv.device)
                kda[i] = KdaState(layer.conv[at], layer.recurrent[at])
            else:
                mla[i] = layer.rows[torch.tensor(list(sequences), device=layer.rows.device)]
        return ModelState(kda, mla, [self.lengths[b] for b in sequences], self.capacity)


def _tensors(layer: KdaState | MlaState) -> tuple[Tensor, ...]:
    return (layer.conv, layer.recurrent) if isinstance(layer, KdaState) else (layer.rows,)
