"""One rank's forwards: prefill prompt by prompt, then decode in static batches.

The same code runs with DWDP on and off, in the same order and with the same batches, so that logits can be
compared bitwise. Ranks never meet here: a rank without work runs no forward and its peers read its weights
all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dwdp.executor.messages import WorkItem, WorkResult
from dwdp.executor.request import Logprob
from dwdp.executor.sampler import RequestSampler


class ForwardOwner(Protocol):
    """What every loop needs of a `DwdpManager` or a `StandaloneDenseManager`."""

    def start_forward(self) -> None: ...

    def end_forward(self) -> None: ...


class SimpleLoop:
    """Computes requests on one rank.

    model: a `KimiK3Model`. manager: starts every forward; None when weights are replicated. eos_ids: tokens
    that end a completion. decode: token ids -> text, for stop strings; None without a tokenizer.
    """

    def __init__(
        self,
        model,
        manager: ForwardOwner | None = None,
        *,
        eos_ids: Sequence[int] = (),
        decode: Callable[[list[int]], str] | None = None,
        max_batch_size: int = 32,
    ) -> None:
        self.model, self.manager, self.decode = model, manager, decode
        self.eos_ids = frozenset(eos_ids)
        self.max_batch_size = max_batch_size
        self.before_forward: Callable[[], None] | None = None  # may raise, to give the work up
        self.forwards = 0

    def forward(self, ids: torch.Tensor, state) -> torch.Tensor:
        """One chunk or one decode step: ids int64 [B, T] -> float32 logits [B, T, vocab]; state goes on in
        place."""
        if self.before_forward is not None:
            self.before_forward()
        if self.manager is not None:
            self.manager.start_forward()
        with torch.no_grad():
            logits = self.model(ids, state)
        if self.manager is not None:
            self.manager.end_forward()
        self.forwards += 1
        return logits

    def generate(self, items: Sequence[WorkItem], *, logits_sha256: bool = False) -> list[WorkResult]:
        """Completes every item, in static batches of `max_batch_size` in the order given."""
        results: list[WorkResult] = []
        for first in range(0, len(items), self.max_batch_size):
            batch = items[first : first + self.max_batch_size]
            results += self._generate_batch(batch, hashed=logits_sha256)
        return results

    def _generate_batch(self, items: Sequence[WorkItem], *, hashed: bool) -> list[WorkResult]:
        sequences = [_Sequence(item, self, hashed) for item in items]
        states = []
        for sequence in sequences:
            prompt, params = sequence.item.token_ids, sequence.item.params
            state = self.model.new_state(1, len(prompt) + params.max_tokens - 1)
            logits = self.forward(torch.tensor([prompt], dtype=torch.int64), state)
            sequence.take(logits[0])
            states.append(state)
        live = [sequence for sequence in sequences if not sequence.finish_reason]
        if live:
            state = states[0].stack([s for s, sequence in zip(states, sequences) if not sequence.finish_reason])
        del states
        while live:
            ids = torch.tensor([[sequence.tokens[-1]] for sequence in live], dtype=torch.int64)
            logits = self.forward(ids, state)
            for sequence, row in zip(live, logits):
                sequence.take(row)
            rows = [i for i, sequence in enumerate(live) if not sequence.finish_reason]
            if rows and len(rows) < len(live):
                state = state.select(rows)
            live = [live[i] for i in rows]
        return [sequence.result() for sequence in sequences]

    def logits(self, token_ids: Sequence[int], *, chunk_size: int | None = None, decode: int = 0) -> torch.Tensor:
        """Float32 logits [tokens, vocab] of every position.

        The prompt goes in chunks of `chunk_size` tokens (whole by default), its last `decode` tokens one by
        one.
        """
        prefill = len(token_ids) - decode
        chunk = chunk_size or max(prefill, 1)
        bounds = [(at, min(at + chunk, prefill)) for at in range(0, prefill, chunk)]
        bounds += [(at, at + 1) for at in range(prefill, len(token_ids))]
        state = self.model.new_state(1, len(token_ids))
        parts = []
        for start, end in bounds:
            ids = torch.tensor([list(token_ids[start:end])], dtype=torch.int64)
            # a copy: a view would keep nothing of the model's alive, but its scratch may be used again
            parts.append(self.forward(ids, state)[0].to("cpu", torch.float32, copy=True))
        return torch.cat(parts)


class _Sequence:
    """One prompt on its way: what it has generated, and why it ended."""

    def __init__(self, item: WorkItem, loop: SimpleLoop, hashed: bool) -> None:
        self.item, self.loop = item, loop
        self.sampler = RequestSampler(item.params)
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if item.params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.digest = hashlib.sha256() if hashed else None

    def take(self, logits: torch.Tensor) -> None:
        """logits: [T, vocab] of the positions just computed; samples the next token from the last of them.

        On the host, whatever they were computed on: a seed then gives the same draws everywhere.
        """
        logits = (logits[-1:] if self.digest is None else logits).detach().float().cpu()
        if self.digest is not None:
            self.digest.update(logits.contiguous().numpy().astype("<f4", copy=False).data)
        token, logprobs = self.sampler.sample(logits[-1])
        self.tokens.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprobs)
        self._test_end(token)

    def _test_end(self, token: int) -> None:
        params = self.item.params
        if token in self.loop.eos_ids and not params.ignore_eos:
            self.finish_reason, self.stop_reason = "stop", token
        elif (found := self._stop_string()) is not None:
            self.finish_reason, self.stop_reason = "stop", found
        elif len(self.tokens) >= params.max_tokens:
            self.finish_reason = "length"

    def _stop_string(self) -> str | None:
        if not self.item.params.stop:
            return None
        text = self.loop.decode(self.tokens)
        found = [(text.find(stop), stop) for stop in self.item.params.stop if stop in text]
        return min(found)[1] if found else None

    def result(self) -> WorkResult:
        return WorkResult(
            index=self.item.index,
            token_ids=self.tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
            logits_sha256=None if self.digest is None else self.digest.hexdigest(),
        )
