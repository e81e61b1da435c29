"""What a plan is made for: the command line over the config file, and the environment over both, as in a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwdp import env
from dwdp.config import files
from dwdp.config.gate import check_store
from dwdp.config.schema import DenseConfig, DwdpConfig, ServeConfig, dwdp_section, validate
from dwdp.errors import ConfigError

EXPERT_DEFAULTS = {"num_experts_per_worker": 0, "num_prefetch_experts": 0, "num_prefetch_slots": 2}
DENSE_OPTIONS = {"segments": "--segments", "min_bytes": "--min-bytes", "store_chunk_mb": "--store-chunk-mb"}
# Fields of a `dwdp` section that a plan would have to follow and does not.
_NOT_PLANNED = ("page_granules", "mapping_budget")


@dataclass(frozen=True)
class PlanSettings:
    """experts: the fields of `EXPERT_DEFAULTS`. dense: None where no dense DWDP is planned. notes: lines that say
    where a value is from when no option gave it. keep_fp8: as the config file has it."""

    experts: dict[str, int]
    dense: DenseConfig | None
    notes: tuple[str, ...]
    keep_fp8: bool = False


def read_settings(
    ranks: int,
    config_file: Path | None,
    shipped: Path | None,
    *,
    experts: Mapping[str, int | None],
    dense: bool,
    dense_options: Mapping[str, Any],
    environ: env.Environ = None,
) -> PlanSettings:
    """Options are by field, None where not given. shipped: the model's own config, if any, which is taken for several
    ranks where no other file is named. Raises ConfigError, one line."""
    given = {field: value for field, value in dense_options.items() if value is not None}
    if given and not dense:
        named = ", ".join(f"{DENSE_OPTIONS[field]} {value}" for field, value in given.items())
        raise ConfigError(f"{named} has no effect without --dense")
    if dense and ranks < 2:
        raise ConfigError(f"--dense with --ranks {ranks}: dense DWDP needs dwdp_size > 1")
    for field, value in given.items():
        validate(DenseConfig, {field: value}, what=DENSE_OPTIONS[field])  # so that no file is blamed for it
    notes = []
    path = config_file
    if path is None and shipped is not None and ranks > 1 and shipped.exists():
        path = shipped
    config = ServeConfig() if path is None else files.load_config_file(path, {"ranks": ranks})
    if path is not None and path is not config_file and (config.dwdp or (dense and config.dense_dwdp)):
        notes.append(f"the model's own config {path} is used; --config replaces it")
    _refuse_not_planned(config, path)
    section = {} if config.dwdp is None else dwdp_section(config.dwdp, ranks, what=f"{path} dwdp").model_dump()
    chosen = {
        field: next(v for v in (experts.get(field), section.get(field), default) if v is not None)
        for field, default in EXPERT_DEFAULTS.items()
    }
    if not dense:
        left_out = _dense_left_out(config, path, ranks, environ)
        return PlanSettings(chosen, None, (*notes, *left_out), config.keep_fp8)
    asked = {} if config.dense_dwdp is None else config.dense_dwdp.model_dump(exclude_unset=True)
    overrides = env.dense_overrides(environ, attached=True)
    overrides.pop("enabled", None)  # --dense asks what it would do
    settings, lines = env.override_section(DenseConfig(**(asked | given)), overrides, title="dense_dwdp")
    check_store(settings)
    return PlanSettings(chosen, settings, (*notes, *lines), config.keep_fp8)


def _dense_left_out(config: ServeConfig, path: Path | None, ranks: int, environ: env.Environ) -> list[str]:
    """A line where a launch would have dense DWDP and the plan has not."""
    found = env.setting("DWDP_DENSE", environ)
    in_file = config.dense_dwdp is not None and config.dense_dwdp.enabled
    if ranks < 2 or not (in_file if found is None else found.value):
        return []
    where = f"{path} (dense_dwdp.enabled)" if found is None else f"{found.variable}={found.text}"
    return [f"{where} switches dense DWDP on, which is not planned: --dense plans it"]


def _refuse_not_planned(config: ServeConfig, path: Path | None) -> None:
    if config.replicated:
        raise ConfigError(f"{path}: replicated is true, there is nothing to plan")
    for field in _NOT_PLANNED if config.dwdp is not None else ():
        value, default = getattr(config.dwdp, field), DwdpConfig.model_fields[field].default
        if value != default:
            raise ConfigError(f"{path}: dwdp.{field} {value} is not planned, only its default is ({default})")
