"""From what a caller asked for to one checked launch, before any rank exists: what can be refused is refused
here."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dwdp import env
from dwdp.config import files
from dwdp.config.gate import LaunchSettings, check_launch, check_supported, no_sms
from dwdp.config.schema import DenseConfig, DwdpConfig, ServeConfig, dwdp_section, validate
from dwdp.errors import CheckpointError, ConfigError
from dwdp.executor.generation import GENERATION_NAME, SamplingDefaults, read_sampling_defaults
from dwdp.executor.messages import RankSettings
from dwdp.partition.experts import ExpertPartition

if TYPE_CHECKING:
    from dwdp.model.config import ModelConfig
    from dwdp.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NANO_MODEL = "nano-k3"
SHIPPED_CONFIG = "dwdp.yaml"
HOST_MAX_SEQ_LEN = 4096
"""Most tokens of a sequence on the host when `max_seq_len` is not set."""


@dataclass(frozen=True)
class Launch:
    """A launch that may start. partition: of the experts, None when every rank holds all. mode: of dense DWDP, see
    `check_launch`. sampling: what a request has that does not say."""

    settings: RankSettings
    model_config: ModelConfig
    partition: ExpertPartition | None
    mode: str
    tokenizer: Tokenizer | None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def ranks(self) -> int:
        return self.settings.ranks

    def traced(self) -> Launch:
        """The same, with a trace kept by every rank. ConfigError where no weights move, so that there is none."""
        moves = self.settings.dwdp is not None or self.settings.dense_dwdp is not None
        if not moves or self.ranks == 1:
            why = "one rank holds everything" if self.ranks == 1 else "DWDP is off"
            raise ConfigError(f"a trace was asked for, and no weights move: {why}")
        return replace(self, settings=msgspec.structs.replace(self.settings, trace=True))


def model_folder(model: str | os.PathLike, *, asked_by: str = "--model") -> Path:
    """The folder of a checkpoint; `nano-k3` is the one that is shipped. Raises CheckpointError for no folder.

    asked_by: what the caller gave it to, for the message.
    """
    if model == NANO_MODEL:
        return Path(__file__).resolve().parent.parent / "models" / NANO_MODEL
    if not isinstance(model, (str, os.PathLike)):
        raise CheckpointError(f"{asked_by} takes a path or {NANO_MODEL}, got {model!r}")
    problem = _folder_problem(os.fspath(model))
    if problem:
        raise CheckpointError(
            f"no such model: {model} {problem} ({asked_by} takes a checkpoint's folder or {NANO_MODEL})"
        )
    return Path(model)


def _folder_problem(path: str) -> str | None:
    """Why `path` is no folder that ranks can be told to read; None when it is one."""
    if not path:
        return "is empty"
    try:
        os.path.realpath(path).encode()  # messages carry it as UTF-8
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return "is not a folder"
        return None if os.access(path, os.R_OK | os.X_OK) else "cannot be read: Permission denied"
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:  # a byte 0, or a name that is no UTF-8
        return f"cannot be a path: {error}"


def launch_fields(model: str, config_file: str | os.PathLike | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `resolve` (and `LLM`) from a config file with the command line's values over it.

    Without a file the model folder's own `dwdp.yaml`, where there is one, says how the model is best served
    by several ranks; with one rank or replicated weights its DWDP sections do not apply.
    """
    validate(ServeConfig, dict(given), what="command line")  # so that a file is not blamed for these values
    shipped = model_folder(model) / SHIPPED_CONFIG
    if config_file is None and not shipped.exists():
        return {"model": model} | dict(given)
    config = files.load_config_file(shipped if config_file is None else config_file, given)
    fields = {name: getattr(config, name) for name in config.model_fields_set}
    notes = []
    if config_file is None:
        notes.append(f"the model's own config {shipped} is used; --config replaces it")
        if config.replicated or config.ranks == 1:
            fields = {name: value for name, value in fields.items() if name not in ("dwdp", "dense_dwdp")}
    sections = config.dwdp or (config.dense_dwdp and config.dense_dwdp.enabled)
    if sections and (config.replicated or len(fields) < len(config.model_fields_set)):
        why = "the weights are replicated" if config.replicated else "there is one rank"
        notes.append(f"the sections dwdp and dense_dwdp of the config do not apply: {why}")
    return {"model": model, "notes": tuple(notes)} | fields


def resolve(
    model: str | os.PathLike,
    *,
    ranks: int | None = None,
    dwdp: Mapping[str, Any] | DwdpConfig | None = None,
    dense_dwdp: Mapping[str, Any] | DenseConfig | None = None,
    environ: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    **server_fields: Any,
) -> Launch:
    """Checks a launch against config, environment, machine and checkpoint headers.

    ranks: None where nobody gave a number: 1, or tp_size with attention_dp. notes: lines for the log, once the launch
    is accepted. server_fields: the other fields of `ServeConfig`. Raises ValueError (ConfigError, GateError,
    CheckpointError), one line, for everything that can be known before a rank is built.
    """
    asked = dict(server_fields) if ranks is None else {"ranks": ranks, **server_fields}
    if dense_dwdp is not None:
        asked["dense_dwdp"] = _plain(dense_dwdp)
    plain = validate(ServeConfig, asked, what="LLM")
    if dwdp is not None:
        asked["dwdp"] = dwdp_section(_plain(dwdp), files.ranks_of(plain))
    config, lines = files.resolve(validate(ServeConfig, asked, what="LLM"), environ)

    from dwdp.executor.devices import choose_device

    device, device_why = choose_device(config.device)
    mode = _check_gate(config, model, environ, device)
    folder = model_folder(model)
    sampling = read_sampling_defaults(folder)
    model_config, tokenizer = _read_model(folder)
    partition = None
    if config.dwdp is not None:
        config.dwdp.group_of(config.ranks - 1, config.ranks)  # refuses groups that the ranks do not fill
        partition = ExpertPartition.from_config(config.dwdp, num_experts=model_config.num_experts)
    elif config.attention_dp:
        partition = ExpertPartition.balanced(config.ranks, model_config.num_experts)
    settings = RankSettings(
        model=str(folder.resolve()),
        ranks=config.ranks,
        dtype=config.dtype,
        keep_fp8=config.keep_fp8,
        device=config.device,
        max_seq_len=_max_seq_len(config.max_seq_len, model_config.max_position_embeddings),
        max_batch_size=config.max_batch_size,
        dwdp=None if config.dwdp is None else config.dwdp.model_dump(mode="json"),
        dense_dwdp=config.dense_dwdp.model_dump(mode="json") if mode != "off" else None,
        attention_dp=config.attention_dp,
        allow_shared_device=config.dwdp is not None and config.dwdp.allow_shared_device,
        dense_sm_reserve=env.value("DWDP_SM_RESERVE", environ) if mode == "standalone" else None,
        dense_gather_kernel=env.value("DWDP_GATHER_KERNEL", environ) or "auto",
        cores=len(os.sched_getaffinity(0)),
        socket_dir=env.socket_dir(environ),
    )
    for line in (_choices(config, mode, device, device_why, env.kernels(environ)), *notes, *lines):
        logger.info("%s", line)
    transfer = config.dense_dwdp.copy if mode == "standalone" else config.dwdp and config.dwdp.transfer
    if sampling.fields:
        logger.info("where a request does not say: %s (%s)", sampling.describe(), GENERATION_NAME)
    if sampling.unserved:
        logger.warning("%s: %s has no effect", GENERATION_NAME, ", ".join(sampling.unserved))
    for line in env.ineffective(environ, gather=transfer == "gather" and device == "cuda"):
        logger.warning("%s", line)
    return Launch(settings, model_config, partition, mode, tokenizer, sampling)


def _choices(config: ServeConfig, mode: str, device: str, device_why: str, kernels: str) -> str:
    """Domain, device, kernels and transfer of a launch, each with its reason."""
    shared = (config.dwdp is not None and config.ranks > 1) or mode == "standalone"
    why_not = "weights are replicated" if config.dwdp is None else "one rank holds everything"
    if config.attention_dp:
        why_not = "the ranks divide the experts and share no memory"
    on_cpu = device == "cpu"
    domain = "host (memfds, the device is a CPU)" if on_cpu else "cuda (handles of the GPUs' memory, of a type tried)"
    domain = domain if shared else f"none ({why_not})"
    transfer = f"none ({why_not})"
    if mode == "standalone":
        transfer = f"{config.dense_dwdp.copy} (dense_dwdp.copy)"
    elif shared:
        transfer = _transfer(config.dwdp, on_cpu)
    auto = "float32 (auto, on a CPU)" if on_cpu else "the checkpoint's (auto, on a GPU)"
    dtype = auto if config.dtype == "auto" else f"{config.dtype} (asked for)"
    if on_cpu and kernels != "triton":
        kernels = "eager torch (a CPU has no others)"
    else:
        kernels = f"{kernels} (DWDP_KERNELS)"
    return (
        f"domain {domain}, device {device} ({device_why}), kernels {kernels}, "
        f"transfer {transfer}, dtype {dtype}, ranks {config.ranks}"
    )


def _transfer(dwdp: DwdpConfig, on_cpu: bool) -> str:
    if dwdp.prefetch_gather:
        beside = "; contention_opt has no effect beside it" if dwdp.contention_opt else ""
        twin = ", as its twin on the host" if on_cpu else ""
        return f"gather (prefetch_gather, kernel {dwdp.gather_kernel}{twin}{beside})"
    return f"{dwdp.transfer} ({'contention_opt' if dwdp.contention_opt else 'the default'})"


def _plain(section: Any) -> Any:
    """A mapping of any kind as a dict; what is none is left to the validation, which names it."""
    return dict(section) if isinstance(section, Mapping) else section


def _check_gate(config: ServeConfig, model: str | os.PathLike, environ: Mapping[str, str] | None, device: str) -> str:
    """config: as `files.resolve` gives it; device: that is used -> the mode of dense DWDP."""
    from dwdp.executor.devices import capabilities

    dense_copy = files.requested_dense_copy(config.dense_dwdp, environ)
    kernel = None
    if config.dwdp is not None and config.dwdp.prefetch_gather:
        kernel = config.dwdp.gather_kernel
    elif config.dwdp is None and config.dense_dwdp.enabled and (dense_copy or "").strip().lower() == "gather":
        kernel = env.value("DWDP_GATHER_KERNEL", environ) or "auto"
    found = capabilities(device, gather_kernel=kernel)
    unable = {what: why for what, why in found.items() if why is not None}
    for what, why in unable.items():
        logger.info("this device has no %s: %s", what, why)
    mode = check_launch(
        LaunchSettings(
            dense=config.dense_dwdp.enabled,
            dwdp_size=None if config.dwdp is None else config.dwdp.dwdp_size,
            tp_size=config.tp_size,
            attention_dp=config.attention_dp,
            overlap_scheduler=config.overlap_scheduler,
            exportable_memory="exportable" not in unable,
            dense_copy=dense_copy,
            group="store",
            gather_available="gather" not in unable,
            batched_available="batched" not in unable,
            expert_transfer=None if config.dwdp is None else config.dwdp.transfer,
            handle_type="auto" if config.dwdp is None else config.dwdp.handle_type,
            unable=unable,
            role=config.role,
            gathered_bytes_per_step=_gathered_bytes(config, model, device),
        )
    )
    check_supported(config, mode, device)
    reserve = env.setting("DWDP_SM_RESERVE", environ)
    if mode == "standalone" and reserve is not None and device == "cpu":
        raise ConfigError(no_sms(f"{reserve.variable}={reserve.text}"))
    if config.attention_dp and config.tp_size == 1:
        raise ConfigError("attention_dp: true needs tp_size, the number of ranks, over 1: it is 1")
    if config.overlap_scheduler:
        raise ConfigError("overlap_scheduler: true is not supported yet: every step waits for its results")
    return mode


def _gathered_bytes(config: ServeConfig, model: str | os.PathLike, device: str) -> int | None:
    """What one forward of a rank gathers, where the gate's warning needs it: standalone, in a role that decodes."""
    dense = config.dense_dwdp
    if not (dense.enabled and config.attention_dp and config.tp_size > 1 and config.role != "context"):
        return None
    from dwdp.executor.devices import compute_dtype
    from dwdp.model.config import ModelConfig
    from dwdp.model.dense_shapes import dense_shapes
    from dwdp.model.headers import read_config
    from dwdp.model.loader import stored_dtype

    folder = model_folder(model)
    dtype = compute_dtype(config.dtype, device) or stored_dtype(folder)
    shapes = dense_shapes(
        ModelConfig.from_dict(read_config(folder)),
        segments=dense.segments,
        min_bytes=dense.min_bytes,
        dtype=str(dtype).removeprefix("torch."),
        kept_fp8=_kept_fp8(folder) if config.keep_fp8 else (),
    )
    return sum(blob.nbytes for blob in shapes.layout_of(config.ranks).blobs)


def _kept_fp8(folder: Path) -> frozenset[str]:
    from dwdp.model.checkpoint import read_config
    from dwdp.model.config import ModelConfig
    from dwdp.model.formats import read_formats
    from dwdp.model.kept_fp8 import kept_fp8

    document = read_config(folder)
    return kept_fp8(ModelConfig.from_dict(document), read_formats(folder, document))


def _read_model(folder: Path) -> tuple[ModelConfig, Tokenizer | None]:
    """Reads headers and tokenizer only; every missing, extra or misshapen tensor is found here."""
    from dwdp.model.config import ModelConfig
    from dwdp.model.headers import read_config
    from dwdp.model.loader import load_reads
    from dwdp.model.tokenizer import load_tokenizer

    load_reads(folder)
    config = ModelConfig.from_dict(read_config(folder))
    return config, load_tokenizer(folder, config.vocab_size)


def _max_seq_len(asked: int | None, model_limit: int) -> int:
    if asked is None:
        return min(model_limit, HOST_MAX_SEQ_LEN)
    if asked > model_limit:
        raise ConfigError(f"max_seq_len {asked} is over the model's limit of {model_limit} tokens")
    return asked
