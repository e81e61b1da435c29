"""Every environment variable, typed: the only module that reads `os.environ`.

A switch is named `DWDP_...`; the original's name is an alias. A value that cannot be read raises
`ConfigError` naming the variable and what it accepts. Functions take the environment as a mapping for tests
(`None`: the process's own).
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
import stat
import sysconfig
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dwdp.errors import ConfigError

logger = logging.getLogger(__name__)

Environ = Mapping[str, str] | None

TRUE_WORDS = frozenset({"1", "true", "on", "yes"})
FALSE_WORDS = frozenset({"0", "false", "off", "no"})
BOOLEAN = "0/1, true/false, on/off or yes/no"
MAX_INTEGER = 2**53 - 1  # as in config files
MAX_SECONDS = 1e9  # no wait of the operating system can be much longer
SECONDS = f"a number of seconds > 0 and at most {MAX_SECONDS:.0e}"


# Parsers take the stripped, non-empty text and raise ValueError when they cannot read it.


def _boolean(text: str) -> bool:
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError


def _text(text: str) -> str:
    text.encode()  # UnicodeEncodeError, a ValueError, for bytes that are no UTF-8: messages could not carry them
    return text


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # int() alone would also take "1_0", "+1" and digits of other scripts.
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise ValueError
        value = int(text)
        if not low <= value <= (MAX_INTEGER if high is None else high):
            raise ValueError
        return value

    return parse


def _seconds(text: str) -> float:
    if not re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise ValueError
    value = float(text)
    if not 0 < value <= MAX_SECONDS:
        raise ValueError
    return value


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError
        return text.lower()

    return parse


def _segments(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.lower().split(",")]
    if "attn" not in names or len(set(names)) != len(names) or not set(names) <= {"attn", "moe"}:
        raise ValueError
    return ("attn", "moe") if "moe" in names else ("attn",)


@dataclass(frozen=True)
class Switch:
    """One variable: what it means, how it is read and what it accepts. `keep`: used, with a warning, for unreadable
    text."""

    name: str
    alias: str | None
    meaning: str
    parse: Callable[[str], object]
    accepted: str
    keep: object = None


@dataclass(frozen=True)
class Setting:
    """A switch that is set: the variable that was read, its text and the value it means."""

    variable: str
    text: str
    value: object


def _dwdp(name: str, meaning: str, parse: Callable[[str], object], accepted: str, keep: object = None) -> Switch:
    return Switch(f"DWDP_{name}", f"TRTLLM_DWDP_{name}", meaning, parse, accepted, keep)


_COUNT = f"a whole number >= 0 and at most {MAX_INTEGER}"
_BYTES, _MIB = _COUNT.replace("number", "number of bytes"), _COUNT.replace("number", "number of MiB")
_COPIES = "batched, per_slice or gather"

SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        _dwdp("DENSE", "dense DWDP on or off", _boolean, BOOLEAN),
        _dwdp(
            "DENSE_COPY", "how standalone dense copies are submitted; attached it is not read",
            _choice("batched", "per_slice", "gather"), _COPIES,
        ),
        _dwdp(
            "DENSE_REQUIRED", "on: a failed set-up raises on every rank; off: replicated weights serve on",
            _boolean, BOOLEAN, keep=True,
        ),
        _dwdp("DENSE_SEGMENTS", "which dense weights move", _segments, "'attn' or 'attn,moe'"),
        _dwdp("DENSE_MIN_BYTES", "smaller storages stay replicated", _integer(0), _BYTES),
        _dwdp("DENSE_STORE_CHUNK_MB", "about the size of a handle of rows; 0: one handle", _integer(0), _MIB),
        _dwdp("DENSE_STRICT", "demand fetches, leaks and the like are errors", _boolean, BOOLEAN),
        _dwdp("DENSE_DEBUG", "1: NaN in slots at commit, leaks named; 2: watchdog too", _integer(0, 2), "0, 1 or 2"),
        _dwdp("PREFETCH_GATHER", "experts move by an SM gather", _boolean, BOOLEAN),
        _dwdp(
            "GATHER_KERNEL", "kernel of the gather; auto: tma where the GPU has it",
            _choice("auto", "tma", "ldst"), "auto, tma or ldst",
        ),
        Switch(
            "DWDP_SM_RESERVE", "TRTLLM_CUTEDSL_SM_RESERVE", "SMs kept out of persistent compute grids",
            _integer(0), _COUNT,
        ),
        Switch(
            "DWDP_DISABLE_COOP_ROUTING", "TLLM_ROUTING_DISABLE_COOP_LAUNCH",
            "cooperative launches of routing kernels off", _boolean, BOOLEAN,
        ),
        _dwdp("RANK", "this process's rank in a group of independent processes", _integer(0), _COUNT),
        _dwdp("MASTER_ADDR", "where rank 0 of such a group serves its store", _text, "a host name or address"),
        _dwdp("MASTER_PORT", "the port of that store", _integer(1, 65535), "a port number from 1 to 65535"),
        _dwdp("SOCKET_DIR", "where the ranks' sockets lie; unset: a private temporary folder", _text, "a folder"),
        _dwdp(
            "GROUP_TOKEN", "the group's secret, needed where ranks span hosts",
            _text, "a secret text, or the path of a file with it",
        ),
        _dwdp(
            "RENDEZVOUS_TIMEOUT_S", "deadline of the rendezvous and of every collective (1800)", _seconds, SECONDS
        ),
        Switch(
            "DWDP_KERNELS", None, "how the model computes; auto: triton where its checks passed (Hopper)",
            _choice("auto", "torch", "triton"), "auto, torch or triton",
        ),
        Switch(
            "DWDP_SKIP_KV_CACHE_ESTIMATION", "TRTLLM_SKIP_KV_CACHE_ESTIMATION",
            "the KV cache is sized without a forward", _boolean, BOOLEAN,
        ),
        Switch(
            "DWDP_EXECUTOR_SHUTDOWN_DROP_INFLIGHT", "TRTLLM_EXECUTOR_SHUTDOWN_DROP_INFLIGHT",
            "requests in flight are dropped at the end", _boolean, BOOLEAN,
        ),
        Switch(
            "DWDP_SERVE_GRACEFUL_SHUTDOWN_TIMEOUT_S", "TRTLLM_SERVE_GRACEFUL_SHUTDOWN_TIMEOUT_S",
            "how long a server waits for requests at its end", _seconds, SECONDS,
        ),
    )
}  # fmt: skip

DEFAULT_RENDEZVOUS_TIMEOUT_SECONDS = 1800.0


def _environ(environ: Environ) -> Mapping[str, str]:
    return os.environ if environ is None else environ


def given(name: str, environ: Environ = None) -> tuple[str, str] | None:
    """(variable, text) of the switch `name` or its alias, unread; None when neither is set."""
    environ = _environ(environ)
    switch = SWITCHES[name]
    for variable in (switch.name, switch.alias):
        if variable is not None and variable in environ:
            return variable, environ[variable]
    return None


def setting(name: str, environ: Environ = None) -> Setting | None:
    """The switch `name` as it is set, or None when neither it nor its alias is.

    Raises ConfigError for a value that cannot be read, and when variable and alias mean different values.
    """
    environ = _environ(environ)
    switch = SWITCHES[name]
    found = [
        Setting(variable, environ[variable], _value(switch, variable, environ[variable]))
        for variable in (switch.name, switch.alias)
        if variable is not None and variable in environ
    ]
    if len(found) == 2 and found[0].value != found[1].value:
        first, second = found
        # The group's token is a secret: no message shows it.
        shown = [s.variable if name == "DWDP_GROUP_TOKEN" else f"{s.variable}={s.text}" for s in found]
        raise ConfigError(
            f"{shown[0]} and {shown[1]} are both set and differ: {second.variable} is an alias of "
            f"{first.variable}; unset one of them"
        )
    return found[0] if found else None


def value(name: str, environ: Environ = None) -> object:
    """The value of the switch `name`, or None when it is not set. Raises as `setting` does."""
    found = setting(name, environ)
    return None if found is None else found.value


def _value(switch: Switch, variable: str, text: str) -> object:
    try:
        if not text.strip():
            raise ValueError
        return switch.parse(text.strip())
    except ValueError:
        shown = "(not shown)" if switch.name == "DWDP_GROUP_TOKEN" and text.strip() else repr(text)
        message = f"{variable}={shown} cannot be read: it accepts {switch.accepted}"
        if switch.keep is None:
            raise ConfigError(message) from None
        logger.warning("%s; it stays %s", message, "on" if switch.keep is True else switch.keep)
        return switch.keep


def check_environment(environ: Environ = None) -> None:
    """Reads every switch once, so that a bad value raises at start and not when it is first needed.

    DWDP_DENSE_COPY is left out: whether it is read at all depends on the launch (see config/files.py).
    DWDP_DENSE_REQUIRED is left out too: it cannot fail, and would warn twice.
    """
    for name in SWITCHES:
        if name not in ("DWDP_DENSE_COPY", "DWDP_DENSE_REQUIRED"):
            setting(name, environ)
    group_token(environ)


# Which field of which config section a switch overrides.
DENSE_FIELDS = {
    "enabled": "DWDP_DENSE",
    "copy": "DWDP_DENSE_COPY",
    "required": "DWDP_DENSE_REQUIRED",
    "segments": "DWDP_DENSE_SEGMENTS",
    "min_bytes": "DWDP_DENSE_MIN_BYTES",
    "store_chunk_mb": "DWDP_DENSE_STORE_CHUNK_MB",
    "strict": "DWDP_DENSE_STRICT",
    "debug": "DWDP_DENSE_DEBUG",
}
EXPERT_FIELDS = {
    "prefetch_gather": "DWDP_PREFETCH_GATHER",
    "gather_kernel": "DWDP_GATHER_KERNEL",
    "sm_reserve": "DWDP_SM_RESERVE",
}


def dense_overrides(environ: Environ = None, *, attached: bool) -> dict[str, Setting]:
    """Field of `DenseConfig` -> the variable that overrides it. Attached, the copy switch is not parsed."""
    return _overrides(DENSE_FIELDS, environ, skip={"copy"} if attached else set())


def expert_overrides(environ: Environ = None) -> dict[str, Setting]:
    """Field of `DwdpConfig` -> the variable that overrides it."""
    return _overrides(EXPERT_FIELDS, environ, skip=set())


def _overrides(fields: Mapping[str, str], environ: Environ, skip: set[str]) -> dict[str, Setting]:
    found = {field: setting(name, environ) for field, name in fields.items() if field not in skip}
    return {field: one for field, one in found.items() if one is not None}


def override_section(section, overrides: Mapping[str, Setting], *, title: str):
    """Lays variables over a config section, a pydantic model.

    Returns (the new section, the log lines, one a variable); each line says which value won.
    """
    if not overrides:
        return section, []
    lines = []
    for field, one in overrides.items():
        old = getattr(section, field)
        origin = "the config's" if field in section.model_fields_set else "the default"
        won = f"{one.value!r} is used, not {origin} {old!r}"
        lines.append(f"{one.variable}={one.text} overrides {title}.{field}: {won}")
    given_fields = {name: getattr(section, name) for name in section.model_fields_set}
    values = given_fields | {field: one.value for field, one in overrides.items()}
    return type(section).model_validate(values), lines


def rendezvous_timeout_seconds(environ: Environ = None) -> float:
    """Deadline of the rendezvous and of every collective, in seconds."""
    seconds = value("DWDP_RENDEZVOUS_TIMEOUT_S", environ)
    return DEFAULT_RENDEZVOUS_TIMEOUT_SECONDS if seconds is None else float(seconds)


def kernels(environ: Environ = None) -> str:
    """Which form of the model's computations is asked for: auto, torch or triton. Every layer asks."""
    return _kernels(_environ(environ).get("DWDP_KERNELS"))


@functools.lru_cache(maxsize=16)
def _kernels(text: str | None) -> str:
    return "auto" if text is None else str(_value(SWITCHES["DWDP_KERNELS"], "DWDP_KERNELS", text))


def triton_interpreted(environ: Environ = None) -> bool:
    """Whether Triton runs its kernels in its interpreter, on the host: as Triton reads its own variable."""
    return _environ(environ).get("TRITON_INTERPRET", "").strip().lower() in TRUE_WORDS


def socket_dir(environ: Environ = None) -> str | None:
    """The folder for descriptor sockets, or None when the group is to make a private temporary one."""
    return value("DWDP_SOCKET_DIR", environ)


def group_token(environ: Environ = None) -> str | None:
    """The group's secret, read from a file when the variable is a file's path; None when it is not set.

    Raises ConfigError for a path without a readable, non-empty file that no other user can open; the message never
    shows the secret.
    """
    found = setting("DWDP_GROUP_TOKEN", environ)
    if found is None:
        return None
    text = str(found.value)
    path = Path(text).expanduser()
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file:
        # The path of a file that is missing must not become a secret that anybody can guess.
        if text.startswith(("/", "./", "../", "~")):
            raise ConfigError(
                f"{found.variable} names a file that does not exist: it accepts a secret text, "
                "or the path of a file with it"
            )
        return text
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"{found.variable}: the token file {text} has mode {mode:04o}, which lets other users at it: chmod 600"
            )
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = type(error).__name__
        raise ConfigError(f"{found.variable}: the token file {text} cannot be read: {reason}") from None
    if not secret:
        raise ConfigError(f"{found.variable}: the token file {text} is empty")
    return secret


def child_environment(environ: Environ = None, **extra: str | None) -> dict[str, str]:
    """The environment for a child process: this one's with `extra` laid over it (None removes a variable).

    The child finds the same `dwdp` package as this process, also when that found it by `sys.path` alone.
    """
    child = dict(_environ(environ))
    source = str(Path(__file__).resolve().parent.parent)
    # A site folder is on the child's path anyway, and in front of the standard library it could shadow it.
    if source not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        entries = [entry for entry in child.get("PYTHONPATH", "").split(os.pathsep) if entry]
        if source not in entries:
            child["PYTHONPATH"] = os.pathsep.join([source, *entries])
    for name, text in extra.items():
        if text is None:
            child.pop(name, None)
        else:
            child[name] = str(text)
    return child


# [Note: where a rank's number comes from]
# The first complete set of DWDP_RANK and its pair, torchrun, MPI, Slurm wins. MPI and Slurm give no store
# address: it comes from DWDP_MASTER_ADDR/PORT or MASTER_ADDR/PORT, and Slurm's set is complete only with it. MPI's
# is complete without, where no DWDP_ variable begins another: its own messages then carry the group. A set of
# another launcher with one process forms no group: schedulers set one for ordinary jobs.

_FOREIGN_SETS = (
    ("torchrun", (("RANK", "WORLD_SIZE"),)),
    (
        "MPI",
        (
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
            ("PMI_RANK", "PMI_SIZE"),
        ),
    ),
    ("Slurm", (("SLURM_PROCID", "SLURM_NTASKS"),)),
)


@dataclass(frozen=True)
class RankPlace:
    """This process's place in a group of independent processes.

    source: the set of variables it came from. size: None when neither that set nor the launch says.
    master_addr, master_port: of the group's store; None under MPI without one, whose messages carry the group.
    store_exists: the launcher already serves a store at the address, so that rank 0 must not host one.
    """

    source: str
    rank: int
    size: int | None
    master_addr: str | None
    master_port: int | None
    store_exists: bool = False

    @property
    def has_store(self) -> bool:
        return self.master_addr is not None

    def __str__(self) -> str:
        size = "" if self.size is None else f" of {self.size}"
        where = f"at {self.master_addr}:{self.master_port}" if self.has_store else "without a store"
        return f"{self.source}: rank {self.rank}{size} {where}"

    def disagrees(self, other: RankPlace) -> bool:
        sizes_differ = None not in (self.size, other.size) and self.size != other.size
        address, other_address = (self.master_addr, self.master_port), (other.master_addr, other.master_port)
        stores_differ = self.has_store and other.has_store and address != other_address
        return self.rank != other.rank or sizes_differ or stores_differ


def discover_rank(size: int | None = None, environ: Environ = None) -> RankPlace | None:
    """This process's place among independent processes, or None when nothing says that it has one.

    size: the number of ranks that the launch asks for. Logs which set was taken and warns about a second set
    that disagrees. Raises ConfigError for values that cannot be read, a DWDP set that lacks a variable, a
    rank that is not below the size, or a launcher's size other than `size`.
    """
    environ = _environ(environ)
    own, missing = _own_place(environ)
    places = [own] if own is not None else []
    for title, pairs in _FOREIGN_SETS:
        try:
            place = _foreign_place(title, pairs, environ)
        except ConfigError as error:
            if not places:
                raise
            logger.warning("%s is taken; ignored: %s", places[0], error)
            continue
        if place is not None:
            places.append(place)
    if missing:
        text = f"{', '.join(missing)} not set: DWDP_RANK, DWDP_MASTER_ADDR and DWDP_MASTER_PORT go together"
        if not places:
            raise ConfigError(text)
        if "DWDP_RANK" not in missing:
            logger.warning("%s is taken; DWDP_RANK is ignored: %s", places[0], text)
    if not places:
        return None
    taken = places[0]
    for other in places[1:]:
        if taken.disagrees(other):
            logger.warning("%s is taken although %s disagrees", taken, other)
    if size is not None and taken.size is not None and taken.size != size:
        raise ConfigError(f"{taken.source} runs {taken.size} processes but the launch has {size} ranks")
    known_size = size if taken.size is None else taken.size
    if known_size is not None and taken.rank >= known_size:
        raise ConfigError(f"{taken.source}: rank {taken.rank} is not below the number of ranks, {known_size}")
    logger.info("rank and address are taken from %s", taken)
    return RankPlace(taken.source, taken.rank, known_size, taken.master_addr, taken.master_port, taken.store_exists)


def _own_place(environ: Mapping[str, str]) -> tuple[RankPlace | None, list[str]]:
    """(the DWDP set's place or None, the names that an incomplete set lacks)."""
    names = ("DWDP_RANK", "DWDP_MASTER_ADDR", "DWDP_MASTER_PORT")
    rank, address, port = values = [value(name, environ) for name in names]
    missing = [name for name, one in zip(names, values) if one is None]
    if not missing:
        return RankPlace("DWDP_RANK", rank, None, address, port), []
    return None, missing if len(missing) < len(names) else []


def _foreign_place(title: str, pairs: tuple[tuple[str, str], ...], environ: Mapping[str, str]) -> RankPlace | None:
    pair = next((pair for pair in pairs if all(environ.get(name, "").strip() for name in pair)), None)
    if pair is None:
        return None
    address: str | None = environ.get("MASTER_ADDR", "").strip() or None
    port: int | None = None
    if title != "torchrun":
        own_address, own_port = value("DWDP_MASTER_ADDR", environ), value("DWDP_MASTER_PORT", environ)
        if own_address is not None and own_port is not None:
            address, port = own_address, own_port
    if address is None or (port is None and not environ.get("MASTER_PORT", "").strip()):
        names = ("DWDP_RANK", "DWDP_MASTER_ADDR", "DWDP_MASTER_PORT")
        if title != "MPI" or any(given(name, environ) is not None for name in names):
            return None
        rank, size = _foreign_integer(pair[0], environ, 0, None), _foreign_integer(pair[1], environ, 1, None)
        return None if size == 1 else RankPlace(title, rank, size, None, None)
    rank = _foreign_integer(pair[0], environ, 0, None)
    size = _foreign_integer(pair[1], environ, 1, None)
    if port is None:
        port = _foreign_integer("MASTER_PORT", environ, 1, 65535)
    if size == 1:
        return None
    store_exists = title == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankPlace(title, rank, size, address, port, store_exists)


def _foreign_integer(name: str, environ: Mapping[str, str], low: int, high: int | None) -> int:
    try:
        return _integer(low, high)(environ[name].strip())
    except ValueError:
        limit = f"from {low} to {high}" if high is not None else f">= {low}"
        shown = f"{name}={environ[name]!r}"
        raise ConfigError(f"{shown} cannot be read: it accepts a whole number {limit}") from None


def set_default(name: str, text: str) -> None:
    """Sets a variable of this process and its children that the user has not set."""
    os.environ.setdefault(name, text)


_held: dict[str, tuple[int, list[str]]] = {}  # switch -> (who holds its default, variables that this module has set)
_held_lock = threading.Lock()


def hold_default(name: str, text: str) -> Setting:
    """Sets the switch `name` and its alias in this process, for code that reads either; -> what holds from now on.

    What the user has set stays, and its value is the other variable's too. Ends with as many calls of `drop_default`;
    rank threads of one process may each hold it.
    """
    with _held_lock:
        count, ours = _held.get(name, (0, []))
        found = setting(name) or Setting(name, text, SWITCHES[name].parse(text))
        if not count:
            ours = [v for v in (name, SWITCHES[name].alias) if v is not None and v not in os.environ]
            os.environ.update(dict.fromkeys(ours, found.text))
        _held[name] = count + 1, ours
        return found


def drop_default(name: str) -> None:
    """The end of one `hold_default`; the last one leaves the environment as the user made it."""
    with _held_lock:
        count, ours = _held.pop(name)
        if count > 1:
            _held[name] = count - 1, ours
            return
        for variable in ours:
            os.environ.pop(variable, None)


# Read, and refused when malformed, but used by nothing yet: servers, KV caches.
WITHOUT_EFFECT = (
    "DWDP_SKIP_KV_CACHE_ESTIMATION",
    "DWDP_EXECUTOR_SHUTDOWN_DROP_INFLIGHT",
    "DWDP_SERVE_GRACEFUL_SHUTDOWN_TIMEOUT_S",
)


def ineffective(environ: Environ = None, *, gather: bool = False) -> list[str]:
    """One line for each variable that is set and changes nothing: not supported yet, not in this launch, or no name of
    ours. gather: whether a gather takes SMs of a GPU."""
    environ = _environ(environ)
    unused = {name: "what it is for is not supported yet" for name in WITHOUT_EFFECT}
    if not gather:
        unused["DWDP_DISABLE_COOP_ROUTING"] = "no gather takes SMs of a GPU here"
    lines = [
        f"{found[0]} has no effect: {why}"
        for name, why in unused.items()
        if (found := given(name, environ)) is not None
    ]
    for name in sorted(set(environ) - set(SWITCHES)):
        if name.startswith("DWDP_"):
            near = nearest(name, SWITCHES)
            lines.append(f"{name} is no variable of dwdp" + (f"; {near} is" if near else ""))
    return lines


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one may have meant: one that is spelled like it in the words in which they
    differ, else the one that holds it whole, or the longest that it begins with."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 3)
    for one in close:
        words = [word.split("_") for word in (name, one)]
        same = next((i for i, (a, b) in enumerate(zip(*words)) if a != b), min(map(len, words)))
        rests = ["_".join(word[same:]) for word in words]
        if all(rests) and difflib.SequenceMatcher(None, *rests).ratio() >= 0.6:
            return one
    begun = max((one for one in known if name.startswith(f"{one}_")), key=len, default=None)
    holding = [one for one in known if f"_{name}_" in f"_{one}_"]
    return (holding[0] if len(holding) == 1 else None) or begun or next(iter(close), None)
