"""The model of a plan: one known by name, or a folder, opened and checked. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from dwdp.errors import CheckpointError, ConfigError
from dwdp.model.config import ModelConfig
from dwdp.model.folder import Folder, check_config, has_weights, open_folder
from dwdp.model.formats import expert_format, read_formats
from dwdp.model.headers import read_config
from dwdp.model.kept_fp8 import kept_fp8, released_fp8

KNOWN_MODELS = {"kimi-k3": Path(__file__).resolve().parent.parent / "models" / "kimi-k3.json"}
FORMATS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "bf16": "plain"}  # as the option spells them -> as the model does


@dataclass(frozen=True)
class PlannedModel:
    """format_name: of the experts, as the option spells it. folder: None for a model known by name, and where a folder
    has a config.json and no weights."""

    config: ModelConfig
    format_name: str
    folder: Folder | None = None


def read_model(model: str, format_name: str | None) -> PlannedModel:
    """--model and --format -> what is planned. A folder with weights is opened and checked as a loader checks it.

    A folder's quantization_config decides the format, and a --format that differs is refused; a model known by name
    is planned in any format. Raises ValueError, one line.
    """
    if format_name is not None and format_name not in FORMATS:
        raise ValueError(f"--format {format_name} is unknown; known are {', '.join(FORMATS)}")
    path = KNOWN_MODELS.get(model)
    if path is not None:
        data = json.loads(path.read_text(encoding="utf-8"))
        config = ModelConfig.from_dict(data)
        declared = expert_format(path.parent, config, read_formats(path.parent, data))
        return PlannedModel(config, _name_of(declared) if format_name is None else format_name)
    place = folder_of(model)
    try:
        if has_weights(place):
            folder = open_folder(place)
            config, declared = folder.config, folder.expert_format
        else:
            folder, data = None, read_config(place)
            config = check_config(place, data)
            declared = expert_format(place, config, read_formats(place, data))
    except CheckpointError as error:
        raise CheckpointError(f"--model {model}: {error}") from None
    if not config.moe_layer_indices:
        raise ConfigError(f"--model {model} has no routed experts, there is nothing to plan")
    if format_name not in (None, _name_of(declared)):
        raise ValueError(f"--format {format_name}: the experts of --model {model} are {_name_of(declared)}")
    return PlannedModel(config, _name_of(declared), folder)


def _name_of(form: str) -> str:
    return next(name for name, known in FORMATS.items() if known == form)


def kept_projections(model: str, config: ModelConfig, format_name: str) -> frozenset[str]:
    """Projections that keep their FP8 weights where keep_fp8 asks for it: of a folder as it declares them, of a model
    known by name as its NVFP4 release has them."""
    if model in KNOWN_MODELS:
        return released_fp8(config) if format_name == "nvfp4" else frozenset()
    place = folder_of(model)
    return kept_fp8(config, read_formats(place, read_config(place)))


def folder_of(model: str) -> Path:
    """The folder that --model names. Raises CheckpointError, which lists what else it may be."""
    from dwdp.executor.settings import NANO_MODEL, model_folder

    if model != NANO_MODEL and not os.path.isdir(model):
        names = ", ".join([*KNOWN_MODELS, NANO_MODEL])
        raise CheckpointError(f"no such model: --model {model} is neither a folder with a config.json nor {names}")
    return model_folder(model)
