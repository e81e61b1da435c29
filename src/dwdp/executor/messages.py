"""What the front end and its ranks say to each other.

A message is a msgpack header, one of the structs below, and raw frames for tensors behind it. The front end's
ROUTER socket talks to one DEALER socket a rank (identity: the rank in decimal), `ipc://` in a folder of mode
0700. A rank speaks first (`Hello`), so the front end can reach it; then it answers every command with exactly
one answer that carries the command's call number. `Progress` and `Log` may come at any time.
"""

from __future__ import annotations

import msgspec

from dwdp.errors import RequestError
from dwdp.executor.request import Logprob, SamplingParams


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a rank builds itself from, decided by the front end and the same on every rank.

    dwdp, dense_dwdp: the config sections as plain documents, dwdp None without expert DWDP. attention_dp: the ranks
    step together and divide the experts. max_batch_size: sequences that decode together. dense_gather_kernel: of
    standalone copies by gather. cores: compute threads are max(1, cores // ranks). store_host, store_port: where the
    group's TCPStore listens; port 0 for runs without a group. allow_shared_device: several ranks may be on one GPU.
    dense_sm_reserve: SMs that a standalone launch keeps free. keep_fp8: projections of a checkpoint stay FP8. weights:
    the folder that a weight update has put in the place of `model`'s tensors. trace: the device keeps what it is given
    to do, with times.
    """

    model: str
    ranks: int
    dtype: str
    device: str
    max_seq_len: int
    max_batch_size: int = 32
    dwdp: dict | None = None
    dense_dwdp: dict | None = None
    attention_dp: bool = False
    dense_gather_kernel: str = "auto"
    keep_fp8: bool = False
    allow_shared_device: bool = False
    dense_sm_reserve: int | None = None
    cores: int = 1
    store_host: str = "127.0.0.1"
    store_port: int = 0
    socket_dir: str | None = None
    weights: str | None = None
    trace: bool = False

    @property
    def has_group(self) -> bool:
        """Whether the ranks meet at all; ranks with replicated weights never do."""
        return self.dwdp is not None or self.attention_dp


class WorkItem(msgspec.Struct, frozen=True):
    """One prompt of a `Generate`; index: its place among the caller's prompts."""

    index: int
    token_ids: list[int]
    params: SamplingParams


class WorkResult(msgspec.Struct, frozen=True):
    """The completion of one `WorkItem`; the fields are those of `CompletionOutput`."""

    index: int
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    logits_sha256: str | None = None


class Setup(msgspec.Struct, tag=True, frozen=True):
    """Build, load and set up; epoch: 0, 1, ... a fresh group every time."""

    call: int
    settings: RankSettings
    epoch: int


class Generate(msgspec.Struct, tag=True, frozen=True):
    call: int
    items: list[WorkItem]
    logits_sha256: bool = False


class Logits(msgspec.Struct, tag=True, frozen=True):
    call: int
    token_ids: list[int]
    chunk_size: int | None = None
    decode: int = 0


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Overwrite the weights with those of the checkpoint folder `path`; check_only: only say whether it fits."""

    call: int
    path: str
    check_only: bool = False


class MarkUnusable(msgspec.Struct, tag=True, frozen=True):
    """Compute nothing any more: what the other ranks have is not known."""

    call: int
    reason: str


class Report(msgspec.Struct, tag=True, frozen=True):
    call: int


class Trace(msgspec.Struct, tag=True, frozen=True):
    call: int


class Release(msgspec.Struct, tag=True, frozen=True):
    call: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    call: int


Command = Setup | Generate | Logits | UpdateWeights | MarkUnusable | Report | Trace | Release | Shutdown


class Hello(msgspec.Struct, tag=True, frozen=True):
    pid: int


class Progress(msgspec.Struct, tag=True, frozen=True):
    """done of total units of a stage, `load`, `setup` or `update`."""

    stage: str
    done: int
    total: int


class Log(msgspec.Struct, tag=True, frozen=True):
    level: int
    name: str
    text: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """A command without a result has been carried out."""

    call: int


class Generated(msgspec.Struct, tag=True, frozen=True):
    call: int
    results: list[WorkResult]


class LogitsReady(msgspec.Struct, tag=True, frozen=True):
    """Little-endian float32 values of this shape are in the next frame."""

    call: int
    shape: list[int]


class Reported(msgspec.Struct, tag=True, frozen=True):
    call: int
    report: dict


class Traced(msgspec.Struct, tag=True, frozen=True):
    """The ops as JSON, a list, are in the next frame."""

    call: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A command failed.

    kind: the exception's class name; text: one line; fatal: the rank ends itself; arguments: what makes one
    of `dwdp.errors` again, None for other classes; echo: the error only tells that another rank failed.
    """

    call: int
    kind: str
    text: str
    fatal: bool
    arguments: list | None = None
    echo: bool = False


Event = Hello | Progress | Log | Done | Generated | LogitsReady | Reported | Traced | Failed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def encode_command(command: Command) -> bytes:
    """Raises RequestError for a field that a rank would not take: to it such a message would be fatal."""
    try:
        data = encode(command)
        decode_command(data)
    except (msgspec.DecodeError, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise RequestError(f"{type(command).__name__.lower()} cannot be sent to a rank: {error}") from None
    return data


def decode_command(data: bytes) -> Command:
    """Raises msgspec.DecodeError for anything that is no command."""
    return _commands.decode(data)


def decode_event(data: bytes) -> Event:
    """Raises msgspec.DecodeError for anything that is no event."""
    return _events.decode(data)


def one_line(text: object) -> str:
    """The text with its newlines as '; ': errors travel and are printed as one line."""
    return "; ".join(part for part in (line.strip() for line in str(text).splitlines()) if part)
