"""What a folder's generation_config.json says about sampling: the values of a request that says nothing itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dwdp.errors import CheckpointError, RequestError
from dwdp.executor.request import SamplingParams
from dwdp.model.headers import is_there, read_json

GENERATION_NAME = "generation_config.json"
_FIELDS = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_PARAMS = [one.name for one in dataclasses.fields(SamplingParams)]
# Keys that would change what is sampled and are not served -> the values that change nothing.
_NOT_SERVED = {
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
}


@dataclass(frozen=True)
class SamplingDefaults:
    """fields: of `SamplingParams`, as the file gives them. unserved: what it asks for besides, as `key value`."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    unserved: tuple[str, ...] = ()

    def params(self, given: Mapping[str, Any], room: int) -> SamplingParams:
        """given: fields that the request has, which win. room: tokens that fit behind the prompt; the file's number of
        new tokens is cut to it, a request's own is not. Raises RequestError naming the field."""
        unknown = sorted(str(name) for name in given if name not in _PARAMS)
        if unknown:
            raise RequestError(f"sampling_params has no field {', '.join(unknown)}; there are {', '.join(_PARAMS)}")
        fields = dict(self.fields)
        if "max_tokens" in fields:
            fields["max_tokens"] = max(1, min(fields["max_tokens"], room))
        return SamplingParams(**(fields | dict(given)))

    def describe(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.fields.items())


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """From generation_config.json, nothing where there is none. `do_sample: false` is temperature 0.

    CheckpointError, one line, names every key with a value that no request may have.
    """
    path = folder / GENERATION_NAME
    if not is_there(path):
        return SamplingDefaults()
    data = read_json(path)
    fields: dict[str, Any] = {}
    problems: list[str] = []
    for key, name in _FIELDS.items():
        if data.get(key) is None:
            continue
        try:
            fields[name] = getattr(SamplingParams(**{name: data[key]}), name)
        except RequestError as error:
            problems.append(str(error).replace(name, key, 1))
    sample = data.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        problems.append(f"do_sample must be true or false, got {sample!r}")
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    if sample is False:
        fields["temperature"] = 0.0
    unserved = [f"{key} {data[key]!r}" for key, plain in _NOT_SERVED.items() if data.get(key) not in (None, plain)]
    return SamplingDefaults(fields, tuple(unserved))
