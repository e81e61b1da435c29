"""From what a caller asked for to one checked launch, before any rank exists: what can be refused is refused
here."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dwdp import env
from dwdp.config import files
from dwdp.config.gate import LaunchSettings, check_launch, check_supported
from dwdp.config.schema import DenseConfig, DwdpConfig, ServeConfig, dwdp_section, validate
from dwdp.errors import CheckpointError, ConfigError
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
    """A launch that may start. partition: None when expert DWDP is off. mode: of dense DWDP, see
    `check_launch`."""

    settings: RankSettings
    model_config: ModelConfig
    partition: ExpertPartition | None
    mode: str
    tokenizer: Tokenizer | None

    @property
    def ranks(self) -> int:
        return self.settings.ranks


def model_folder(model: str | os.PathLike) -> Path:
    """The folder of a checkpoint; `nano-k3` is the one that is shipped. Raises CheckpointError for no
    folder."""
    if str(model) == NANO_MODEL:
        folder = Path(__file__).resolve().parent.parent / "models" / NANO_MODEL
    else:
        folder = Path(model)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"no such model: --model {model} {what} (it is a checkpoint's folder or {NANO_MODEL})")
    return folder


def launch_fields(model: str, config_file: str | os.PathLike | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `resolve` (and `LLM`) from a config file with the command line's values over it.

    Without a file the model folder's own `dwdp.yaml`, where there is one, says how the model is best served
    by several ranks; with one rank or replicated weights its DWDP sections do not apply.
    """
    shipped = model_folder(model) / SHIPPED_CONFIG
    if config_file is None and not shipped.exists():
        return {"model": model} | dict(given)
    config = files.load_config_file(shipped if config_file is None else config_file, given)
    fields = {name: getattr(config, name) for name in config.model_fields_set}
    if config_file is None:
        logger.info("the model's own config %s is used; --config replaces it", shipped)
        if config.replicated or config.ranks == 1:
            fields = {name: value for name, value in fields.items() if name not in ("dwdp", "dense_dwdp")}
    return {"model": model} | fields


def resolve(
    model: str | os.PathLike,
    *,
    ranks: int = 1,
    dwdp: Mapping[str, Any] | DwdpConfig | None = None,
    dense_dwdp: Mapping[str, Any] | DenseConfig | None = None,
    environ: Mapping[str, str] | None = None,
    **server_fields: Any,
) -> Launch:
    """Checks a launch against config, environment, machine and checkpoint headers.

    server_fields: the other fields of `ServeConfig`. Raises ValueError (ConfigError, GateError,
    CheckpointError), one line, for everything that can be known before a rank is built.
    """
    asked = {"ranks": ranks, **server_fields}
    if dense_dwdp is not None:
        asked["dense_dwdp"] = dense_dwdp if isinstance(dense_dwdp, DenseConfig) else dict(dense_dwdp)
    validate(ServeConfig, asked, what="LLM")
    if dwdp is not None:
        asked["dwdp"] = dwdp_section(dwdp if isinstance(dwdp, DwdpConfig) else dict(dwdp), ranks)
    config, lines = files.resolve(validate(ServeConfig, asked, what="LLM"), environ)
    for line in lines:
        logger.info("%s", line)
    mode = _check_gate(config, environ)

    from dwdp.executor.devices import choose_device

    folder = model_folder(model)
    choose_device(config.device)
    model_config, tokenizer = _read_model(folder)
    partition = None
    if config.dwdp is not None:
        config.dwdp.group_of(config.ranks - 1, config.ranks)  # refuses groups that the ranks do not fill
        partition = ExpertPartition.from_config(config.dwdp, num_experts=model_config.num_experts)
    settings = RankSettings(
        model=str(folder.resolve()),
        ranks=config.ranks,
        dtype=config.dtype,
        device=config.device,
        max_seq_len=_max_seq_len(config.max_seq_len, model_config.max_position_embeddings),
        dwdp=None if config.dwdp is None else config.dwdp.model_dump(mode="json"),
        dense_dwdp=config.dense_dwdp.model_dump(mode="json") if mode != "off" else None,
        cores=len(os.sched_getaffinity(0)),
        socket_dir=env.socket_dir(environ),
    )
    return Launch(settings, model_config, partition, mode, tokenizer)


def _check_gate(config: ServeConfig, environ: Mapping[str, str] | None) -> str:
    """config: as `files.resolve` gives it -> the mode of dense DWDP."""
    mode = check_launch(
        LaunchSettings(
            dense=config.dense_dwdp.enabled,
            dwdp_size=None if config.dwdp is None else config.dwdp.dwdp_size,
            tp_size=config.tp_size,
            attention_dp=config.attention_dp,
            overlap_scheduler=config.overlap_scheduler,
            exportable_memory=True,
            dense_copy=files.requested_dense_copy(config.dense_dwdp, environ),
            group="store",
            gather_available=False,
            role=config.role,
        )
    )
    check_supported(config, mode)
    for field, default in (("tp_size", 1), ("attention_dp", False), ("overlap_scheduler", False)):
        value = getattr(config, field)
        if value != default:
            raise ConfigError(f"{field} {value} is not supported yet: ranks do not step together")
    return mode


def _read_model(folder: Path) -> tuple[ModelConfig, Tokenizer | None]:
    """Reads headers and tokenizer only; every missing, extra or misshapen tensor is found here."""
    from dwdp.model.checkpoint import read_config
    from dwdp.model.config import ModelConfig
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
