"""Choosing the next token of one sequence from its logits."""

from __future__ import annotations

import torch

from dwdp.executor.request import Logprob, SamplingParams


class RequestSampler:
    """The sampler of one request; its random numbers depend on its own seed alone, never on its
    neighbours."""

    def __init__(self, params: SamplingParams, device: torch.device | str = "cpu") -> None:
        self.params = params
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            self._generator = torch.Generator(device=device)
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)

    def sample(self, logits: torch.Tensor) -> tuple[int, dict[int, Logprob] | None]:
        """logits: float32 [vocab] -> (token id, log-probabilities when asked for).

        Raises ValueError for logits that are not numbers: a token chosen from them would be a wrong answer.
        """
        if bool(torch.isnan(logits).any()):
            raise ValueError("the model's logits are not numbers (NaN)")
        token = self._draw(logits)
        if self.params.logprobs is None:
            return token, None
        return token, top_logprobs(logits, token, self.params.logprobs)

    def _draw(self, logits: torch.Tensor) -> int:
        params = self.params
        if params.temperature == 0:
            # argmax names the first of several maxima: the lowest id at ties
            return int(torch.argmax(logits))
        # the best logit at 0: however small the temperature, none overflows to infinity
        scaled = (logits.double() - logits.max().double()) / params.temperature
        kept = filter_logits(scaled, top_k=params.top_k, top_p=params.top_p)
        return int(torch.multinomial(torch.softmax(kept, dim=-1), 1, generator=self._generator))


def filter_logits(logits: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """logits: [vocab] -> the same with every token outside the top-k and then the top-p set at -inf.

    The order is by falling logit and, at ties, by rising id; the best token always stays.
    """
    vocab = logits.shape[-1]
    if not 0 < top_k < vocab and top_p >= 1.0:
        return logits
    ordered, ids = torch.sort(logits, descending=True, stable=True)
    if 0 < top_k < vocab:
        ordered[top_k:] = float("-inf")
    if top_p < 1.0:
        probability = torch.softmax(ordered, dim=-1)
        before = torch.cumsum(probability, dim=-1) - probability
        # a token stays while the tokens before it hold less than top_p; the first has nothing before it
        drop = before >= top_p
        drop[0] = False
        ordered[drop] = float("-inf")
    return torch.empty_like(logits).scatter_(0, ids, ordered)


def top_logprobs(logits: torch.Tensor, token: int, count: int) -> dict[int, Logprob]:
    """logits: [vocab] -> the chosen token's log-probability and those of the `count` best tokens."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs[token]
    result = {token: Logprob(float(chosen), int((logprobs > chosen).sum()) + 1)}
    if count:
        values, ids = torch.topk(logprobs, min(count, logprobs.shape[-1]))
        for rank, (value, other) in enumerate(zip(values.tolist(), ids.tolist()), start=1):
            result.setdefault(other, Logprob(value, rank))
    return result
