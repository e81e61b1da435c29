"""From a checkpoint folder to a model: what must be there, what is read, and where each tensor goes.

Every header is read first and every fault of names, shapes, dtypes and formats collected, before memory is
taken. Then this rank's tensors are read file by file in ascending order, each straight into its parameter
when the dtypes agree, so that the peak is the model and one tensor.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dwdp.errors import CheckpointError, ConfigError
from dwdp.model.checkpoint import DTYPES, Checkpoint, ReadLog, TensorEntry
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model
from dwdp.model.formats import Formats, read_formats
from dwdp.model.inventory import MATRICES, Expected, Inventory, expert_module
from dwdp.model.moe import RoutedExperts
from dwdp.model.quant import scale_fp8_blocks_
from dwdp.model.tokenizer import check_tokenizer

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
# bytes read so far, bytes to read in all
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: a parameter or one expert's part of it. `how`: copy, fp8, fp8_scale or a_log."""

    parameter: str
    how: str = "copy"
    row: int | None = None
    part: slice | int | None = None

    def view(self, parameter: Tensor) -> Tensor:
        view = parameter.detach()
        view = view if self.row is None else view[self.row]
        return view if self.part is None else view[self.part]


def load_model(
    path: str | os.PathLike,
    *,
    dtype: str | torch.dtype = "auto",
    expert_range: tuple[int, int] | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    read_log: ReadLog | None = None,
    built: Callable[[KimiK3Model], None] | None = None,
) -> KimiK3Model:
    """The text model of checkpoint folder `path`, with the rows of routed experts [start, end) (None: all).

    dtype: "auto" (the checkpoint's on a GPU, float32 on a CPU), a name or a torch dtype. Packed experts stay
    packed; FP8 weights outside of them become `dtype`. Only this rank's experts are read, all names and
    shapes are checked. `read_log(file, offset, nbytes)` is called for every read, headers included.
    `built(model)` is called with the model on the meta device, before any weight is read, and may refuse it.

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
            expert_format=_expert_format(checkpoint, config, formats),
            expert_range=expert_range,
            device="meta",
        )
        if built is not None:
            built(model)
        places = _match(checkpoint, model, formats)
        model.requires_grad_(False)
        model.to_empty(device=device)
        _fill(checkpoint, model, places, progress)
    return model.eval()


def load_reads(path: str | os.PathLike, *, expert_range: tuple[int, int] | None = None) -> list[TensorEntry]:
    """The tensors that `load_model` would read for a rank, in reading order: no weight is read."""
    with Checkpoint(path) as checkpoint:
        config = _model_config(checkpoint)
        formats = read_formats(checkpoint.path, checkpoint.config)
        expert_format = _expert_format(checkpoint, config, formats)
        model = KimiK3Model(config, expert_format=expert_format, expert_range=expert_range, device="meta")
        return [checkpoint.entries[name] for name in _match(checkpoint, model, formats)]


def _model_config(checkpoint: Checkpoint) -> ModelConfig:
    try:
        return ModelConfig.from_dict(checkpoint.config)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}/config.json: {error}") from error


def _resolve_dtype(dtype: str | torch.dtype, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        stored = (e.dtype for name, e in checkpoint.entries.items() if name.endswith("embed_tokens.weight"))
        return DTYPES.get(next(stored, "BF16"), torch.bfloat16)
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; known are auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _expert_format(checkpoint: Checkpoint, config: ModelConfig, formats: Formats) -> str:
    """The format that config.json gives most experts of the first MoE layer; `_match` finds all others."""
    if not config.moe_layer_indices:
        return "plain"
    layer = config.moe_layer_indices[0]
    modules = (expert_module(layer, e, w) for e in range(config.num_experts) for w in MATRICES)
    declared = [formats.declared(module) for module in modules]
    most = Counter(d.format for d in declared).most_common(1)[0][0]
    if most == "fp8":
        entry = next(d.entry for d in declared if d.format == "fp8")
        raise CheckpointError(f"{checkpoint.path}: {entry}: routed experts are not served in FP8")
    return most


def _match(checkpoint: Checkpoint, model: KimiK3Model, formats: Formats) -> dict[str, Place]:
    """Raw name -> place of all that this rank reads, in reading order; or one error with every fault."""
    inventory = Inventory(checkpoint, formats)
    places: dict[str, Place] = {}
    for expected, place in _expectations(model):
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
    return {name: places[name] for name in checkpoint.entries if name in places}


def _expectations(model: KimiK3Model) -> Iterator[tuple[Expected, dict[str, Place]]]:
    """What the checkpoint must hold, and suffix -> place of what this rank reads of it."""
    experts = {id(p) for layer in model.moe_layers() for p in layer.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in experts:
            continue
        shape = tuple(parameter.shape)
        module = name.removesuffix(".weight")
        if name.endswith(".A_log"):
            yield Expected(name, shape, kind="a_log"), {"": Place(name, "a_log")}
        elif name.endswith(".weight") and len(shape) == 2:
            yield Expected(module, shape, kind="linear"), {".weight": Place(name)}
        else:
            yield Expected(name, shape), {"": Place(name)}
    for layer in model.moe_layers():
        yield from _expert_expectations(model, layer)


def _expert_expectations(model: KimiK3Model, experts: RoutedExperts) -> Iterator[tuple[Expected, dict[str, Place]]]:
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
            if not 0 <= row < experts.num_rows:
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


def _fill(checkpoint: Checkpoint, model: KimiK3Model, places: dict[str, Place], progress: Progress | None) -> None:
    parameters = dict(model.named_parameters())
    total, done = sum(checkpoint.entries[name].nbytes for name in places), 0
    scales: dict[str, Tensor] = {}  # of FP8 weights that are not read yet
    unscaled: set[str] = set()  # FP8 weights whose scale is not read yet
    for name, place in places.items():
        entry, target = checkpoint.entries[name], place.view(parameters[place.parameter])
        if place.how == "a_log":
            _fill_a_log(checkpoint, entry, target)
        elif place.how == "fp8_scale":
            scales[place.parameter] = checkpoint.read(entry).to(target.device)
        else:
            _read_to(checkpoint, entry, target)
        if place.how == "fp8":
            unscaled.add(place.parameter)
        # Weight and scale come in file order, and every E4M3 value is exact in the model's dtype: so the
        # weight waits in its own parameter for the scale, and nothing is held beside it.
        if place.parameter in unscaled and place.parameter in scales:
            scale_fp8_blocks_(target, scales.pop(place.parameter))
            unscaled.discard(place.parameter)
        done += entry.nbytes
        if progress is not None:
            progress(done, total)


def _read_to(checkpoint: Checkpoint, entry: TensorEntry, target: Tensor) -> None:
    if target.device.type == "cpu" and target.dtype == DTYPES[entry.dtype] and target.is_contiguous():
        checkpoint.read_into(entry, target)
    else:
        target.copy_(checkpoint.read(entry).view(target.shape))


def _fill_a_log(checkpoint: Checkpoint, entry: TensorEntry, target: Tensor) -> None:
    values = checkpoint.read(entry).flatten()
    heads = target.numel()
    if values[heads:].count_nonzero():
        raise CheckpointError(
            f"{checkpoint.path}: tensor {entry.name} of {values.numel()} values has a tail behind its "
            f"{heads} heads that is not zero"
        )
    target.copy_(values[:heads])
