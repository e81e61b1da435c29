"""A checkpoint folder as released, opened and checked without torch: config, formats, every tensor's name and shape."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dwdp.errors import CheckpointError
from dwdp.model.config import ModelConfig
from dwdp.model.formats import MATRICES, expert_format, expert_module, read_formats
from dwdp.model.headers import INDEX_NAME, Headers, is_there, read_config
from dwdp.model.inventory import Expected, Inventory, Skipped, check_expert_count, expected_dense
from dwdp.model.shapes import model_tensors
from dwdp.model.tokenizer import check_tokenizer


@dataclass(frozen=True)
class Folder:
    """A folder that can be served. expert_format: plain, mxfp4 or nvfp4."""

    headers: Headers
    config: ModelConfig
    expert_format: str
    skipped: Skipped


def open_folder(path: str | os.PathLike) -> Folder:
    """Reads config.json, the index and all headers, and checks every tensor against what the config makes of it.

    CheckpointError is one line with every missing, extra or misshapen tensor, and with every tensor that the
    quantization_config contradicts; what else is wrong with the folder is one line too.
    """
    config = check_config(path, read_config(path))  # before the headers, of which there may be a million
    headers = Headers(path)
    check_expert_count(headers.path, config.num_experts, len(config.moe_layer_indices), len(headers.entries))
    check_tokenizer(path, config.vocab_size)
    formats = read_formats(headers.path, headers.config)
    form = expert_format(headers.path, config, formats)
    inventory = Inventory(headers.entries, formats)
    for expected in expectations(config, form):
        inventory.take(expected)
    problems = inventory.problems()
    if problems:
        raise CheckpointError(f"{headers.path}: " + "; ".join(problems))
    return Folder(headers, config, form, inventory.skipped)


def check_config(path: str | os.PathLike, data: dict) -> ModelConfig:
    """The model's config from what `read_config` gives; CheckpointError names the file."""
    try:
        return ModelConfig.from_dict(data)
    except ValueError as error:
        raise CheckpointError(f"{path}/config.json: {error}") from error


def has_weights(path: str | os.PathLike) -> bool:
    """Whether there are safetensors files, or an index of some."""
    folder = Path(path)
    return is_there(folder / INDEX_NAME) or any(folder.glob("*.safetensors"))


def expectations(config: ModelConfig, expert_format: str) -> Iterator[Expected]:
    """Everything that a checkpoint of this model must hold, experts last and layer by layer."""
    for name, tensor in model_tensors(config).items():
        yield expected_dense(name, tensor.shape)
    width, inter = config.expert_width, config.moe_intermediate_size
    for layer in config.moe_layer_indices:
        for expert in range(config.num_experts):
            for matrix in MATRICES:
                shape = (width, inter) if matrix == "w2" else (inter, width)
                yield Expected(expert_module(layer, expert, matrix), shape, "expert", expert_format)
