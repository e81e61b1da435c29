"""From what a caller hands in to work items, and from results to `RequestOutput`s; no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dwdp.errors import RequestError
from dwdp.executor.messages import WorkItem, WorkResult
from dwdp.executor.request import CompletionOutput, RequestOutput, SamplingParams, check_prompt

if TYPE_CHECKING:
    from dwdp.executor.settings import Launch
    from dwdp.model.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def prepare(
    launch: Launch,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> tuple[list[str | None], list[WorkItem]]:
    """-> (each prompt's text, None where it came as token ids; the work items, in the same order).

    Raises RequestError for the first prompt that cannot be taken, naming it and the numbers.
    """
    listed = _as_list(prompts)
    each = _params_of(params, len(listed))
    items = []
    for index, (prompt, one) in enumerate(zip(listed, each)):
        what = "prompt" if len(listed) == 1 else f"prompt {index}"
        token_ids = _token_ids(prompt, launch.tokenizer, what)
        check_prompt(
            token_ids,
            one,
            vocab_size=launch.model_config.vocab_size,
            max_seq_len=launch.settings.max_seq_len,
            what=what,
        )
        if one.stop and launch.tokenizer is None:
            raise RequestError(f"{what}: stop {list(one.stop)} needs a tokenizer, and the model has no tokenizer.json")
        items.append(WorkItem(index, token_ids, one))
    return [prompt if isinstance(prompt, str) else None for prompt in listed], items


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(_is_number(one) for one in listed):
        return [listed]
    return listed


def _is_number(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _token_ids(prompt: Prompt, tokenizer: Tokenizer | None, what: str) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(f"{what} is text, and the model has no tokenizer.json; give token ids")
        return tokenizer.encode(prompt)
    if not hasattr(prompt, "__iter__") or isinstance(prompt, (bytes, dict)):
        raise RequestError(f"{what} must be a text or a list of token ids, not {type(prompt).__name__}")
    return plain_ids(prompt)


def plain_ids(token_ids: Sequence[int]) -> list[int]:
    """The ids as Python's integers, also those of numpy and torch; what is no whole number stays as it is."""
    return [token.__index__() if _is_number(token) else token for token in token_ids]


def _params_of(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(
            f"sampling_params must be one SamplingParams or one a prompt: {count} prompts, {len(params)}"
        )
    return params


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
