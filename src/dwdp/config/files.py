"""Config files, and how file, command line and environment become one `ServeConfig`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dwdp import env
from dwdp.config.schema import DenseConfig, DwdpConfig, ServeConfig, dwdp_section, validate
from dwdp.errors import ConfigError


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML 1.2 or (suffix `.json`) JSON file, in JSON's types; nothing is validated yet.

    An empty YAML file is `{}`. Raises ConfigError, one line naming the file, for a file that cannot be read,
    a duplicate key, or anything that JSON has no type for.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None
    try:
        data = _parse_json(text) if path.suffix.lower() == ".json" else _parse_yaml(text)
        _check_json_types(data, "", ())
    except ValueError as error:
        raise ConfigError(f"{path}: {'; '.join(str(error).split(chr(10)))}") from None
    if data is None and path.suffix.lower() != ".json":
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, not {type(data).__name__}")
    return data


def load_config_file(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ServeConfig:
    """The file as a `ServeConfig`.

    overrides: command-line values by field, laid over the file's; a None is an option that was not given.
    A `dwdp` section without `dwdp_size` gets the number of ranks. Raises ConfigError, one line naming file,
    key and value.
    """
    data = read_config_file(path)
    data |= {field: value for field, value in (overrides or {}).items() if value is not None}
    section = data.get("dwdp")
    ranks = asked_ranks(data.get("ranks"), data.get("tp_size", 1), data.get("attention_dp", False))
    if isinstance(section, dict) and "dwdp_size" not in section:
        data["dwdp"] = section | {"dwdp_size": ranks}
    return validate(ServeConfig, None, what=str(path), as_json=json.dumps(data, allow_nan=False))


def asked_ranks(ranks: int | None, tp_size: int, attention_dp: bool) -> int:
    """The number of ranks: with attention_dp `tp_size` is another name for it, and either may be left out.

    ranks: None where nothing says how many.
    """
    if ranks is None:
        return tp_size if attention_dp else 1
    return ranks


def ranks_of(config: ServeConfig) -> int:
    """`asked_ranks` of a config, in which a number that nobody gave is the default's."""
    given = config.ranks if "ranks" in config.model_fields_set else None
    return asked_ranks(given, config.tp_size, config.attention_dp)


def resolve(config: ServeConfig, environ: env.Environ = None) -> tuple[ServeConfig, list[str]]:
    """The launch that `config` and the environment ask for, and the log lines that say which value won.

    In the result `dwdp` is a section exactly when expert DWDP is on, and `dense_dwdp` is always a section.
    Expert DWDP is on when its section is given, and without one when there are several ranks and tp_size is
    1; `replicated` turns it and dense DWDP off, and attention DP, whose ranks divide the experts. Attached,
    DWDP_DENSE_COPY is not laid over: see `requested_dense_copy`. Raises ConfigError.
    """
    env.check_environment(environ)
    ranks = ranks_of(config)
    config = config.model_copy(update={"ranks": ranks})
    dwdp = None if config.dwdp is None else dwdp_section(config.dwdp, ranks)
    if config.tp_size > 1 and not config.attention_dp:
        raise ConfigError(f"tp_size {config.tp_size} needs attention_dp: true")
    if config.tp_size not in (1, ranks):
        raise ConfigError(
            f"tp_size {config.tp_size} must be 1 or the number of ranks, {ranks} (ranks, --ranks): leave one of them "
            "out"
        )
    if dwdp is None and ranks > 1 and config.tp_size == 1:
        dwdp = dwdp_section(None, ranks)
    dense = config.dense_dwdp or DenseConfig()
    lines: list[str] = []
    if config.replicated:
        # The baseline of a comparison: no switch may bring DWDP back.
        dwdp, dense = None, dense.model_copy(update={"enabled": False})
        if config.attention_dp:
            lines = [f"attention_dp and tp_size {config.tp_size} do not apply: the weights are replicated"]
        config = config.model_copy(update={"tp_size": 1, "attention_dp": False})
    else:
        dense, dense_lines = env.override_section(
            dense, env.dense_overrides(environ, attached=dwdp is not None), title="dense_dwdp"
        )
        standalone = dense.enabled and dwdp is None
        dwdp, expert_lines = _override_experts(dwdp, environ, dense_gather=standalone and dense.copy == "gather")
        lines = expert_lines + dense_lines
    return config.model_copy(update={"dwdp": dwdp, "dense_dwdp": dense}), lines


def _override_experts(
    dwdp: DwdpConfig | None, environ: env.Environ, *, dense_gather: bool
) -> tuple[DwdpConfig | None, list[str]]:
    """dense_gather: dense DWDP gathers on its own, with the kernel that the environment names."""
    overrides = env.expert_overrides(environ)
    if dwdp is not None:
        return env.override_section(dwdp, overrides, title="dwdp")
    if dense_gather:
        overrides.pop("gather_kernel", None)
    return None, [f"{one.variable}={one.text} has no effect: expert DWDP is off" for one in overrides.values()]


def requested_dense_copy(dense: DenseConfig, environ: env.Environ = None) -> str | None:
    """The text that asks for a dense copy mode, unread, or None when nothing does: what the gate judges."""
    found = env.given("DWDP_DENSE_COPY", environ)
    if found is not None:
        return found[1]
    return dense.copy if "copy" in dense.model_fields_set else None


def _parse_json(text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in items:
            if key in result:
                raise ValueError(f"duplicate key {key!r}")
            result[key] = value
        return result

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _parse_yaml(text: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    # An older version's directive would bring its booleans (yes, no, on, off) back.
    directive = re.search(r"^%YAML\s+(\S+)", text, re.MULTILINE)
    if directive and directive.group(1) != "1.2":
        raise ValueError(f"asks for YAML {directive.group(1)}; only YAML 1.2 is read")
    yaml = YAML(typ="safe", pure=True)
    try:
        return yaml.load(text)
    except DuplicateKeyError as error:
        key = re.search(r'duplicate key "(.*?)"', str(error))
        raise ValueError(f"duplicate key {key.group(1)!r}{_at(error)}" if key else "duplicate key") from None
    except MarkedYAMLError as error:
        raise ValueError(f"is not YAML: {error.problem or error.context}{_at(error)}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except (YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"is not YAML: {error}") from None


def _at(error: Any) -> str:
    return f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""


def _check_json_types(value: Any, path: str, parents: tuple[int, ...]) -> None:
    """Refuses what JSON has no type for: dates, sets, bytes, NaN, keys that are no text, cycles."""
    where = path or "the top level"
    if id(value) in parents:
        raise ValueError(f"{where} contains itself")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"key {key!r} at {where} is not text")
            _check_json_types(item, f"{path}.{key}" if path else key, (*parents, id(value)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json_types(item, f"{path}.{index}" if path else str(index), (*parents, id(value)))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which is not a number of JSON")
    elif value is not None and not isinstance(value, str | bool | int | float):
        raise ValueError(f"{where} is {value!r}, a {type(value).__name__}, which JSON has no type for")
