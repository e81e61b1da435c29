"""From what a caller hands in to work items, and from results to `RequestOutput`s; no torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from dwdp.errors import RequestError
from dwdp.executor.messages import WorkItem, WorkResult
from dwdp.executor.request import (
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    check_prompt,
    check_text,
    whole_number,
)

if TYPE_CHECKING:
    from dwdp.executor.settings import Launch
    from dwdp.model.tokenizer import Tokenizer

Prompt = str | Sequence[int]
NO_TOKENIZER = "the model has neither tokenizer.json nor tiktoken.model"


def prepare(
    launch: Launch,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | Mapping[str, Any] | None,
) -> tuple[list[str | None], list[WorkItem]]:
    """-> (each prompt's text, None where it came as token ids; the work items, in the same order).

    params: a mapping has some fields of `SamplingParams`; these, and None, leave the others to the model's
    generation_config.json and then to the defaults. A `SamplingParams` is taken as it is.
    Raises RequestError for the first prompt that cannot be taken, naming it and the numbers.
    """
    listed = _as_list(prompts)
    each = _params_of(params, len(listed))
    items = []
    for index, (prompt, one) in enumerate(zip(listed, each)):
        what = "prompt" if len(listed) == 1 else f"prompt {index}"
        token_ids = _token_ids(prompt, launch.tokenizer, what)
        if not isinstance(one, SamplingParams):
            one = launch.sampling.params(one, launch.settings.max_seq_len - len(token_ids))
        check_prompt(
            token_ids,
            one,
            vocab_size=launch.model_config.vocab_size,
            max_seq_len=launch.settings.max_seq_len,
            what=what,
        )
        if one.stop and launch.tokenizer is None:
            raise RequestError(f"{what}: stop {list(one.stop)} needs a tokenizer, and {NO_TOKENIZER}")
        items.append(WorkItem(index, token_ids, one))
    return [prompt if isinstance(prompt, str) else None for prompt in listed], items


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_sequence(prompts):
        raise RequestError(f"prompts must be a text, a list of token ids or a list of these, not {_kind(prompts)}")
    listed = list(prompts)
    if listed and all(whole_number(one) is not None for one in listed):
        return [listed]
    return listed


def _is_sequence(value: object) -> bool:
    """Whether it holds things in an order: arrays and generators too, a scalar array, bytes and dicts not."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping, Set)) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__iter__")


def _kind(value: object) -> str:
    return type(value).__name__


def _token_ids(prompt: Prompt, tokenizer: Tokenizer | None, what: str) -> list[int]:
    if isinstance(prompt, str):
        check_text(what, prompt)
        if tokenizer is None:
            raise RequestError(f"{what} is text, and {NO_TOKENIZER}; give token ids")
        return tokenizer.encode(prompt)
    return plain_ids(prompt, f"{what} must be a text or a list of token ids")


def plain_ids(token_ids: Sequence[int], rule: str) -> list[int]:
    """The ids as Python's integers, also those of numpy and torch; what is no whole number stays as it is.

    Raises RequestError, saying the rule, for something that is no sequence.
    """
    if not _is_sequence(token_ids):
        raise RequestError(f"{rule}, not {_kind(token_ids)}")
    return [token if (number := whole_number(token)) is None else number for token in token_ids]


def _params_of(
    params: SamplingParams | Sequence[SamplingParams] | Mapping[str, Any] | None, count: int
) -> Sequence[SamplingParams | Mapping[str, Any]]:
    if params is None:
        params = {}
    if isinstance(params, (SamplingParams, Mapping)):
        return [params] * count
    rule = "sampling_params must be one SamplingParams or a list with one a prompt"
    if not _is_sequence(params):
        raise RequestError(f"{rule}, not {_kind(params)}")
    each = list(params)
    for one in each:
        if not isinstance(one, SamplingParams):
            raise RequestError(f"{rule}, not a list that holds {_kind(one)}")
    if len(each) != count:
        raise RequestError(f"{rule}, not {len(each)} for {count} prompts")
    return each


def request_output(
    tokenizer: Tokenizer | None, text: str | None, item: WorkItem, result: WorkResult, rank: int
) -> RequestOutput:
    """The answer to one prompt; its text is empty without a tokenizer."""
    cumulative = None
    if result.logprobs is not None:
        cumulative = sum(one[token].logprob for token, one in zip(result.token_ids, result.logprobs))
    completion = CompletionOutput(
        index=0,
        text="" if tokenizer is None else completion_text(tokenizer, result),
        token_ids=list(result.token_ids),
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
        logprobs=result.logprobs,
        cumulative_logprob=cumulative,
        logits_sha256=result.logits_sha256,
    )
    return RequestOutput(str(item.index), text, list(item.token_ids), [completion], rank)


def completion_text(tokenizer: Tokenizer, result: WorkResult) -> str:
    """The text without the end-of-sequence token, or up to the stop string, that ended it."""
    ended_by = result.stop_reason
    text = tokenizer.decode(result.token_ids[:-1] if isinstance(ended_by, int) else result.token_ids)
    return text[: text.index(ended_by)] if isinstance(ended_by, str) else text
