"""What a caller asks for and gets back; no torch here, the front end reads it without."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from dwdp.errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives a token that `SamplingParams.logprobs` may ask for."""


def whole_number(value: object) -> int | None:
    """A whole number of Python, numpy or torch as Python's; None for everything else, truth values included."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")) or getattr(value, "ndim", 0):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """-> the value as Python's integer. Raises RequestError naming the field."""
    given, value = value, whole_number(value)
    if value is None:
        raise RequestError(f"{name} must be a whole number, got {_short(given)}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {bound}, got {_short(value)}")
    return value


def _number(name: str, value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:  # an integer that no float holds
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} must be a finite number, got {_short(value)}")
    return number


def _short(value: object) -> str:
    """Of a value that may be as long as it likes; Python itself refuses to print very long integers."""
    if isinstance(value, int) and abs(value) >= 10**100:
        return "an integer of more than 100 digits"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a completion ends.

    max_tokens: most tokens of the completion. temperature: 0 takes the best token, the lowest id at ties.
    top_k: 0 (or -1) for all tokens, else the k most likely. top_p: smallest set of tokens with at least this
    probability. seed: makes a sampled completion repeatable. stop: texts that end the completion, not part of
    its text. ignore_eos: go on past the end-of-sequence token. logprobs: None, or how many of the most likely
    tokens are reported beside the chosen one, at most 20. n: completions a prompt; only 1.
    Raises RequestError naming the field.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", check_whole("max_tokens", self.max_tokens, 1))
        object.__setattr__(self, "temperature", _number("temperature", self.temperature))
        if self.temperature < 0:
            raise RequestError(f"temperature must not be negative, got {self.temperature}")
        object.__setattr__(self, "top_k", max(0, check_whole("top_k", self.top_k, -1, 2**63 - 1)))
        object.__setattr__(self, "top_p", _number("top_p", self.top_p))
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be over 0 and at most 1, got {self.top_p}")
        if self.seed is not None:
            object.__setattr__(self, "seed", check_whole("seed", self.seed, 0, 2**63 - 1))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        object.__setattr__(self, "n", check_whole("n", self.n, 1))
        if self.n != 1:
            raise RequestError(f"n must be 1, got {_short(self.n)}: more completions a prompt are not supported yet")


def check_text(name: str, text: str) -> None:
    """Raises RequestError for text that is no Unicode: a surrogate alone, as bytes that are no UTF-8 become."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid text: {text[error.start]!r} at position {error.start} is no character"
        ) from None


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"stop must be a text or a list of texts that are not empty, got {_short(value)}")
    for text in texts:
        check_text("stop", text)
    return tuple(texts)


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability under the model, before temperature and cuts.

    rank: 1 for the most likely token of the vocabulary.
    """

    logprob: float
    rank: int


@dataclass
class CompletionOutput:
    """One completion.

    token_ids holds every generated token, an end-of-sequence token included; text leaves that token and
    everything from a stop string on out. finish_reason: `stop` or `length`; stop_reason: the stop string or
    the end-of-sequence id. logits_sha256: see `LLM.generate`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    logits_sha256: str | None = None


@dataclass
class RequestOutput:
    """The answer to one prompt. prompt: its text, None when it was given as token ids; rank: who computed
    it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    rank: int = 0
    finished: bool = True


def check_prompt(
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    max_seq_len: int,
    what: str = "prompt",
) -> None:
    """Refuses a prompt that the model cannot take; `what` names it in the message.

    Raises RequestError: empty, an id outside [0, vocab_size), or prompt + max_tokens over max_seq_len.
    """
    check_token_ids(token_ids, vocab_size=vocab_size, what=what)
    if len(token_ids) + params.max_tokens > max_seq_len:
        raise RequestError(
            f"{what} of {len(token_ids)} tokens + max_tokens {_short(params.max_tokens)} is over max_seq_len "
            f"{max_seq_len}"
        )


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int, what: str) -> None:
    """Raises RequestError when there is no token or an id is no whole number of [0, vocab_size)."""
    if len(token_ids) == 0:
        raise RequestError(f"{what} is empty: at least one token is needed")
    for position, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"{what}: token ids must be whole numbers, got {_short(token)} at position {position}")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{what}: token id {_short(token)} at position {position} is outside the vocabulary, "
                f"0 to {vocab_size - 1}"
            )
