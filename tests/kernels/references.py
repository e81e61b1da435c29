"""What kernels are compared with: the formulas in fp64, sequence by sequence, and random operands."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dwdp.kernels.batch import PackedBatch


@dataclass
class AttentionCase:
    """Operands of latent attention over a packed batch; the cache holds the new rows too."""

    batch: PackedBatch
    query: Tensor
    rows: Tensor
    cache: Tensor
    weight: Tensor
    nope: int
    value: int

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    @property
    def where(self) -> dict:
        return dict(nope=self.nope, value=self.value, scale=self.scale)

    def expected(self) -> Tensor:
        """fp64 [N, heads, value]: keys and values expanded per head, one softmax over all that a query sees."""
        heads, latent = self.query.shape[1], self.weight.shape[1]
        weight = self.weight.double().view(heads, self.nope + self.value, latent)
        outs = []
        for (start, end), before, slot in zip(self.batch.bounds(), self.batch.starts, self.batch.slots):
            rows = self.cache[slot, : before + end - start].double()
            expanded = torch.einsum("sl,hdl->hsd", rows[:, :latent], weight)
            key = torch.cat([expanded[..., : self.nope], rows[None, :, latent:].expand(heads, -1, -1)], -1)
            scores = torch.einsum("nhd,hsd->hns", self.query[start:end].double(), key) * self.scale
            last = before + torch.arange(end - start, device=rows.device)
            hidden = torch.arange(len(rows), device=rows.device) > last[:, None]
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            outs.append(torch.einsum("hns,hsd->nhd", weights, expanded[..., self.nope :]))
        return torch.cat(outs)


def attention_case(
    lengths: list[int],
    starts: list[int],
    *,
    heads: int = 3,
    nope: int = 16,
    rope: int = 8,
    value: int = 16,
    latent: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    capacity: int | None = None,
) -> AttentionCase:
    """Slots are the sequences backwards, with one more that is nobody's; the cache is NaN behind each sequence, up to
    `capacity` rows or 3 behind the longest."""
    draw = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float32, device=device)

    count, longest = len(lengths), max(a + b for a, b in zip(lengths, starts))
    batch = PackedBatch.of(lengths, starts=starts, slots=range(count, 0, -1), state_batch=count + 1, device=device)
    capacity = longest + 3 if capacity is None else capacity
    cache = torch.full((count + 1, capacity, latent + rope), math.nan, dtype=dtype, device=device)
    for before, slot in zip(batch.starts, batch.slots):
        cache[slot, :before] = noise(before, latent + rope).to(dtype)
    rows = noise(batch.num_tokens, latent + rope).to(dtype)
    cache[batch.slot_index[batch.token_sequences], batch.token_positions] = rows
    query = (2 * noise(batch.num_tokens, heads, nope + rope)).to(dtype)
    weight = (noise(heads * (nope + value), latent) * latent**-0.5).to(dtype)
    return AttentionCase(batch, query, rows, cache, weight, nope, value)


def decode_by_pages(query, pages, latent, lengths, table, scale, causal, schedule=None, splits=None):
    """In the place of FlashMLA's operation, whose arguments these are, as its kernel needs them; it makes a schedule
    that says nothing."""
    count, _, heads, width = query.shape
    assert query.is_contiguous() and pages.is_contiguous() and pages.shape[1:] == (64, 1, width) and not causal
    assert lengths.dtype == table.dtype == torch.int32 and lengths.is_contiguous() and len(lengths) == count
    assert (schedule is None) == (splits is None) and int(table.max()) < len(pages)
    outs = []
    for one, length, own in zip(query[:, 0].double(), lengths.tolist(), table):
        rows = pages[own].flatten(0, 2)[:length].double()
        outs.append(((one @ rows.T) * scale).softmax(-1) @ rows[:, :latent])
    out = torch.stack(outs).to(query.dtype)
    made = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(count + 1, dtype=torch.int32)
    return out[:, None], out.new_zeros(count, heads, 1), *((schedule, splits) if schedule is not None else made)
