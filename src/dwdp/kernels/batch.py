"""Sequences of different lengths in one forward, one behind the other: what the host and the device know of them.

Everything is computed on the host and uploaded once, so that no layer waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """B sequences with `lengths[b]` new tokens each, packed without padding; N tokens in all.

    starts: tokens of each that its state already holds, zeros without a state. slots: its place in the state.
    in_order: the state holds just these sequences, in this order. The tensors lie on the device:
    cu_seqlens: int64 [B + 1], where each begins, and N; first_positions: int64 [B], `starts`; slot_index: int64 [B];
    token_sequences, token_positions: int64 [N], the sequence b of each token and its position in it.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    slots: tuple[int, ...]
    in_order: bool
    cu_seqlens: Tensor
    first_positions: Tensor
    slot_index: Tensor
    token_sequences: Tensor
    token_positions: Tensor
    host_cu_seqlens: Tensor  # int64 [B + 1] on the host
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # what layers derive from it, once

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        starts: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
        state_batch: int | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedBatch:
        """starts: None for sequences that begin here. slots: None for 0, 1, ... state_batch: sequences of the state.

        Raises ValueError for a sequence without a token, or slots that are not different places of the state.
        """
        lengths = tuple(int(n) for n in lengths)
        slots = tuple(range(len(lengths))) if slots is None else tuple(int(s) for s in slots)
        starts = (0,) * len(lengths) if starts is None else tuple(int(n) for n in starts)
        places = len(lengths) if state_batch is None else state_batch
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every sequence of a batch has at least one new token; lengths are {list(lengths)}")
        if not len(lengths) == len(slots) == len(starts):
            raise ValueError(f"a batch of {len(lengths)} lengths has {len(slots)} slots and {len(starts)} starts")
        if len(set(slots)) < len(slots) or min(slots) < 0 or max(slots) >= places:
            raise ValueError(f"slots {list(slots)} are not different places of a state of {places} sequences")

        counts = torch.tensor(lengths)
        begins = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=begins[1:])
        sequences = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        first = torch.tensor(starts)
        positions = torch.arange(len(sequences)) + (first - begins[:-1])[sequences]
        uploaded = upload_parts([begins, first, torch.tensor(slots), sequences, positions], device)
        in_order = slots == tuple(range(places))
        return cls(lengths, starts, slots, in_order, *uploaded, host_cu_seqlens=begins)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def bounds(self) -> list[tuple[int, int]]:
        """(first token, end) of each sequence."""
        ends = self.host_cu_seqlens.tolist()
        return list(zip(ends[:-1], ends[1:]))


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """The host's `values` on the device, enqueued behind its work and not waited for."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload_parts(parts: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Each of the host's int64 vectors on the device, in one upload.

    Each begins on 16 bytes whatever their lengths are: kernels are compiled anew for pointers that do not.
    """
    padded = [torch.nn.functional.pad(part, (0, len(part) % 2)) for part in parts]
    pieces = upload(torch.cat(padded), device).split([len(part) for part in padded])
    return [piece[: len(part)] for piece, part in zip(pieces, parts)]
