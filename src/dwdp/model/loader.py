"""From a checkpoint folder to a model: what must be there, what is read, and where each tensor goes.

Every header is read first and every fault of names, shapes, dtypes and formats collected, before memory is
taken. Then this rank's tensors are read file by file in ascending order, many at once (reader.py), each straight into
its parameter when the dtypes agree, so that the peak is the model and a few buffers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping

import torch
from torch import Tensor, nn

from dwdp.errors import CheckpointError, ConfigError, ModelMemoryError
from dwdp.model.checkpoint import DTYPES, Checkpoint
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.model.formats import Formats, expert_format, expert_module, read_formats
from dwdp.model.inventory import Expected, Inventory, check_expert_count, expected_dense
from dwdp.model.kept_fp8 import SCALE
from dwdp.model.landing import Landings, Place
from dwdp.model.moe import RoutedExperts
from dwdp.model.quant_linear import keep_fp8_linears
from dwdp.model.reader import Progress, ReadResult, read_landings
from dwdp.model.safetensors_file import ReadLog, TensorEntry
from dwdp.model.staging import copies_to
from dwdp.model.tokenizer import check_tokenizer
from dwdp.partition.parts import Part

logger = logging.getLogger(__name__)

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def load_model(
    path: str | os.PathLike,
    *,
    dtype: str | torch.dtype = "auto",
    expert_range: tuple[int, int] | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    read_log: ReadLog | None = None,
    built: Callable[[KimiK3Model], Mapping[str, Part] | None] | None = None,
    log_skipped: bool = True,
    keep_fp8: bool = False,
) -> KimiK3Model:
    """The text model of checkpoint folder `path`, with the rows of routed experts [start, end) (None: all).

    dtype: "auto" (the checkpoint's on a GPU, float32 on a CPU), a name or a torch dtype. Packed experts stay
    packed; FP8 weights outside of them become `dtype`, or with `keep_fp8` stay as they are. Only this rank's experts
    are read, all names and shapes are checked. `read_log(file, offset, nbytes)` is called for every read.
    `built(model)` is called with the model on the meta device, when the checkpoint is known to fit and before any
    weight is read. It may refuse it, or give it parameters that lie elsewhere: only what is on the meta device
    still gets memory here, the rest is read into as it is. What it returns are the parts to read of
    parameters, by name, that get no memory in the model: each part is read, handed over and dropped.
    log_skipped: say in a line of the log how many vision tensors the checkpoint has; ranks whose front end has said
    it do not.

    CheckpointError is one line with every missing, extra or misshapen tensor, and with every tensor that
    quantization_config contradicts. ConfigError for an unknown dtype, ValueError for a bad expert range.
    """
    with Checkpoint(path, read_log=read_log) as checkpoint:
        config = _model_config(checkpoint)
        check_tokenizer(path, config.vocab_size)
        formats = read_formats(checkpoint.path, checkpoint.config)
        model = KimiK3Model(
            config,
            dtype=_resolve_dtype(dtype, checkpoint, torch.device(device)),
            expert_format=expert_format(checkpoint.path, config, formats),
            expert_range=expert_range,
            device="meta",
        )
        if keep_fp8:
            keep_fp8_linears(model, formats)
        places = _match(checkpoint, model, formats, log_skipped=log_skipped)
        model.checkpoint_config = checkpoint.config
        parts = (built(model) if built is not None else None) or {}
        model.requires_grad_(False)
        _materialise(model, device, parts)
        _fill(checkpoint, model, places, progress, read_log=read_log, parts=parts, device=device)
    return model.eval()


def _materialise(model: nn.Module, device: str | torch.device, elsewhere: Container[str]) -> None:
    """Memory, not initialised, for every parameter that is on the meta device but those named in `elsewhere`; the
    model has no buffers. ModelMemoryError where a GPU has too little."""
    taken = 0
    try:
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta and f"{prefix}.{name}".lstrip(".") not in elsewhere:
                    setattr(module, name, nn.Parameter(_memory_for(parameter, device), requires_grad=False))
                    taken += parameter.nbytes
    except torch.OutOfMemoryError as error:
        missing = {name: p for name, p in model.named_parameters() if p.is_meta and name not in elsewhere}
        raise ModelMemoryError(
            f"the weights that a rank loads whole take {taken + sum(p.nbytes for p in missing.values())} bytes of "
            f"memory on {device}, which ran out {taken} bytes on; free memory there, use more ranks, dense DWDP with "
            "load: sharded (dense_dwdp), or a smaller model"
        ) from error


def _memory_for(parameter: Tensor, device: str | torch.device) -> Tensor:
    # `empty_like` of a tensor on the meta device would import sympy, for seconds
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)


def load_reads(path: str | os.PathLike, *, expert_range: tuple[int, int] | None = None) -> list[TensorEntry]:
    """The tensors that `load_model` would read for a rank, in reading order: no weight is read."""
    with Checkpoint(path) as checkpoint:
        config = _model_config(checkpoint)
        formats = read_formats(checkpoint.path, checkpoint.config)
        form = expert_format(checkpoint.path, config, formats)
        model = KimiK3Model(config, expert_format=form, expert_range=expert_range, device="meta")
        places = _match(checkpoint, model, formats, log_skipped=True)
        return [checkpoint.entries[name] for name in places]


class WeightUpdate:
    """Another checkpoint for a model that is loaded, checked when it is opened. Context manager.

    expert_range: the experts [start, end) whose rows this rank writes; None: all. The model's tables begin at the
    expert that they say. digest: of all names, dtypes and shapes. Opening raises CheckpointError, one line, for a
    checkpoint that the model could not have been loaded from: another config.json, other tensors, another format.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        model: KimiK3Model,
        *,
        expert_range: tuple[int, int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._model, self._progress = model, progress
        self._checkpoint = Checkpoint(path)
        try:
            _check_same_config(self._checkpoint, model)
            formats = read_formats(self._checkpoint.path, self._checkpoint.config)
            self._places = _match(self._checkpoint, model, formats, expert_range)
            self._check_values()
            self.digest = self._checkpoint.digest()
        except BaseException:
            self._checkpoint.close()
            raise

    def _check_values(self) -> None:
        """What `_fill` could refuse, found before anything is written."""
        checks = Landings(self._checkpoint.path, self._model, "cpu", {}).checks(self._places, self._checkpoint.entries)
        read_landings(self._checkpoint.path, checks)

    def write(self) -> None:
        """Overwrites the parameters in place. An error on the way leaves them half written."""
        _fill(self._checkpoint, self._model, self._places, self._progress)

    def __enter__(self) -> WeightUpdate:
        return self

    def __exit__(self, *exc: object) -> None:
        self._checkpoint.close()


def _check_same_config(checkpoint: Checkpoint, model: KimiK3Model) -> None:
    """The quantization_config is part of it, so that the formats are the same too."""
    new, loaded = checkpoint.config, model.checkpoint_config
    if loaded is None:
        raise ConfigError("only a model that was loaded from a checkpoint can be updated")
    differing = sorted(key for key in new.keys() | loaded.keys() if new.get(key) != loaded.get(key))
    if differing:
        raise CheckpointError(
            f"{checkpoint.path}/config.json is not the one that this model was loaded with: "
            f"{', '.join(differing)} differ; only weights can be updated"
        )


def _model_config(checkpoint: Checkpoint) -> ModelConfig:
    try:
        config = ModelConfig.from_dict(checkpoint.config)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}/config.json: {error}") from error
    check_expert_count(checkpoint.path, config.num_experts, len(config.moe_layer_indices), len(checkpoint.entries))
    return config


def _resolve_dtype(dtype: str | torch.dtype, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return _stored_dtype(checkpoint)
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; known are auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    stored = (e.dtype for name, e in checkpoint.entries.items() if name.endswith("embed_tokens.weight"))
    return DTYPES.get(next(stored, "BF16"), torch.bfloat16)


def stored_dtype(path: str | os.PathLike) -> torch.dtype:
    """What "auto" is for a checkpoint on a GPU: the dtype of its embedding."""
    with Checkpoint(path) as checkpoint:
        return _stored_dtype(checkpoint)


def _match(
    checkpoint: Checkpoint,
    model: KimiK3Model,
    formats: Formats,
    expert_range: tuple[int, int] | None = None,
    *,
    log_skipped: bool = False,
) -> dict[str, Place]:
    """Raw name -> place of all that this rank reads, in reading order; or one error with every fault.

    expert_range: None for all experts that the model's tables have.
    """
    inventory = Inventory(checkpoint.entries, formats)
    places: dict[str, Place] = {}
    for expected, place in _expectations(model, expert_range):
        found = inventory.take(expected)
        for suffix, name in found.names.items():
            if found.format == "fp8":
                how = "fp8" if suffix == ".weight" else "fp8_scale"
                places[name] = Place(place[".weight"].parameter, how)
            elif suffix in place:
                places[name] = place[suffix]
    problems = inventory.problems()
    if problems:
        raise CheckpointError(f"{checkpoint.path}: " + "; ".join(problems))
    if log_skipped and inventory.skipped.count:
        logger.info("%s", inventory.skipped.describe())
    places |= _kept_places(model, places)
    return {name: places[name] for name in checkpoint.entries if name in places}


def _kept_places(model: KimiK3Model, places: dict[str, Place]) -> dict[str, Place]:
    """Those of FP8 weights and scales that the model keeps: they are copied."""
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float8_e4m3fn}
    scales = {"fp8": "", "fp8_scale": "_scale"}
    return {
        name: Place(place.parameter + scales[place.how])
        for name, place in places.items()
        if place.how in scales and place.parameter in kept
    }


def _expectations(
    model: KimiK3Model, expert_range: tuple[int, int] | None
) -> Iterator[tuple[Expected, dict[str, Place]]]:
    """What the checkpoint must hold, and suffix -> place of what this rank reads of it."""
    experts = {id(p) for layer in model.moe_layers() for p in layer.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in experts or name.endswith(f".{SCALE}"):  # a scale is found with its weight
            continue
        expected = expected_dense(name, tuple(parameter.shape))
        place = Place(name, "a_log" if expected.kind == "a_log" else "copy")
        yield expected, {".weight" if expected.kind == "linear" else "": place}
    for layer in model.moe_layers():
        first = layer.first_expert
        yield from _expert_expectations(model, layer, expert_range or (first, first + layer.num_rows))


def _expert_expectations(
    model: KimiK3Model, experts: RoutedExperts, expert_range: tuple[int, int]
) -> Iterator[tuple[Expected, dict[str, Place]]]:
    width, inter = model.config.expert_width, model.config.moe_intermediate_size
    base = expert_module(experts.layer_index)
    # w13 is w1 (gate) above w3 (up): matrix -> its table, its rows there, its place in the two factors
    parts = {
        "w1": ("w13", slice(0, inter), 0),
        "w3": ("w13", slice(inter, 2 * inter), 1),
        "w2": ("w2", None, None),
    }
    for expert in range(experts.num_experts):
        row = expert - experts.first_expert
        for matrix, (table, part, half) in parts.items():
            shape = (width, inter) if matrix == "w2" else (inter, width)
            expected = Expected(
                expert_module(experts.layer_index, expert, matrix),
                shape,
                kind="expert",
                format=model.expert_format,
            )
            if not expert_range[0] <= expert < expert_range[1]:
                yield expected, {}
                continue
            weight = Place(f"{base}.{table}", row=row, part=part)
            yield (
                expected,
                {
                    ".weight": weight,
                    ".weight_packed": weight,
                    ".weight_scale": Place(f"{base}.{table}_scale", row=row, part=part),
                    ".weight_scale_2": Place(f"{base}.{table}_scale_2", row=row, part=half),
                },
            )


def _fill(
    checkpoint: Checkpoint,
    model: KimiK3Model,
    places: Mapping[str, Place],
    progress: Progress | None,
    *,
    read_log: ReadLog | None = None,
    parts: Mapping[str, Part] | None = None,
    device: str | torch.device | None = None,
) -> ReadResult:
    """Reads every place's tensor. device: where the weights are; None: where the model's are."""
    if device is None:
        device = next(model.parameters()).device
    landings = Landings(checkpoint.path, model, device, parts or {})
    passes = [one for one in landings.passes(places, checkpoint.entries) if one]
    total = sum(landing.file_range[1] for one in passes for landing in one)
    result = ReadResult()
    for one in passes:
        shown = None if progress is None else _shifted(progress, result.needed, total)
        result += read_landings(checkpoint.path, one, copies=copies_to(device), read_log=read_log, progress=shown)
    logger.info("%s: read %s", checkpoint.path, result.describe())
    return result


def _shifted(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)
