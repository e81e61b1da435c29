"""Training batches for nano-k3, drawn on the device that trains.

A batch has two parts. Short rows hold one question each, as a user's prompt does. Long rows are half
questions one after another, half GSM8K text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dwdp.tools import nano_data as data


@dataclass(frozen=True)
class Rows:
    """inputs, targets and loss weights, each [rows, length]."""

    inputs: Tensor
    targets: Tensor
    weight: Tensor

    @classmethod
    def of(cls, ids: Tensor, weight: Tensor) -> Rows:
        """ids and weight: [rows, length + 1]; weight 1 where the token is to be predicted."""
        return cls(ids[:, :-1].long(), ids[:, 1:].long(), weight[:, 1:].float())

    def copy_(self, other: Rows) -> None:
        for mine, its in zip(self.tensors(), other.tensors()):
            mine.copy_(its)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs, self.targets, self.weight


class Batches:
    """`next()` is (short rows, long rows).

    A question's loss is taken on its answer alone: digits and newline, and in a short row the end of text
    after them. Text has its loss everywhere. The first half of the long rows is questions.
    """

    def __init__(
        self,
        tokenizer,
        documents: Sequence[str],
        *,
        questions: int,
        short: int,
        long: int,
        length: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.short, self.long, self.length, self.device = short, long, length, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.text = torch.from_numpy(tokens(tokenizer, documents)).to(device)
        rng = random.Random(seed)
        lines = ["".join(data.line(*data.draw(rng))) for _ in range(questions)]
        raw = np.frombuffer("".join(lines).encode(), dtype=np.uint8)
        table = np.zeros(256, dtype=np.int16)
        for character in "0123456789+-=\n":
            (table[ord(character)],) = tokenizer.encode(character).ids
        ids = table[raw]
        newline = raw == ord("\n")
        ends = np.flatnonzero(newline)
        starts = np.concatenate([[0], ends[:-1] + 1])
        # Inside a line, everything behind its first (and only) equals sign is the answer.
        equals = raw == ord("=")
        answer = (np.cumsum(equals) - np.concatenate([[0], np.cumsum(newline)[:-1]]) > 0) & ~equals

        end, pad = (tokenizer.token_to_id(token) for token in (data.END_OF_TEXT, data.PAD))
        width = np.diff(np.concatenate([starts, [len(raw)]]))
        column = np.arange(len(raw)) - np.repeat(starts, width)
        row = np.repeat(np.arange(questions), width)
        table_ids = np.full((questions, data.LINE_TOKENS), pad, dtype=np.int16)
        table_answer = np.zeros((questions, data.LINE_TOKENS), dtype=bool)
        table_ids[row, column], table_answer[row, column] = ids, answer
        table_ids[np.arange(questions), width] = end
        table_answer[np.arange(questions), width] = True
        starts = starts[starts < len(raw) - length]
        if not len(starts) or len(self.text) <= length:
            raise ValueError(f"{questions} questions, or the text, do not fill a row of {length} tokens")
        self.line_ids, self.line_answer, self.ids, self.answer, self.starts = (
            torch.from_numpy(x).to(device) for x in (table_ids, table_answer, ids, answer, starts)
        )

    def _random(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), generator=self.generator, device=self.device)

    def next(self) -> tuple[Rows, Rows]:
        picked = self._random(len(self.line_ids), self.short)
        short = Rows.of(self.line_ids[picked], self.line_answer[picked])
        offsets = torch.arange(self.length + 1, device=self.device)
        num_text = self.long // 2
        at = self.starts[self._random(len(self.starts), self.long - num_text)][:, None] + offsets
        text = self.text[self._random(len(self.text) - self.length, num_text)[:, None] + offsets]
        weight = torch.cat([self.answer[at], torch.ones_like(text, dtype=torch.bool)])
        return short, Rows.of(torch.cat([self.ids[at], text]), weight)


def tokens(tokenizer, documents: Sequence[str]) -> np.ndarray:
    """int16 ids of the documents, an end of text after each."""
    end = tokenizer.token_to_id(data.END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents)):
        ids += [*encoding.ids, end]
    return np.array(ids, dtype=np.int16)
