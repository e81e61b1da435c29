"""What the runtime asks of a device: streams, events, and work enqueued in stream order.

[Note: events] `wait` captures the event's latest record at the time of the call, as on CUDA: a later
record does not move it, and a wait on an event that was never recorded waits for nothing. Events are made
once at setup and recorded again and again.

[Note: reads in a trace] The kernels of a model are not announced one by one. The runtimes call `note_read` where a read
window opens, behind the wait, and where it closes, before the end of read is recorded: no kernel of the window comes
before the first or behind the second, so that what is ordered against both is ordered against all. Auxiliary streams
have joined compute before the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class Stream(Protocol):
    """Work runs in the order in which it was enqueued."""

    name: str


class Event(Protocol):
    name: str


class Device(Protocol):
    """Streams of one rank. A context manager with an idempotent `close()`.

    compute: the stream that reads slots; copy: the stream that fills them; auxiliary: others that read
    synchronisations: host waits for the whole device so far
    exposed_wait_seconds, exposed_wait_by_layer: time compute spent waiting, in all and by the wait's layer
    trace: ops in the neutral form {"stream", "kind", "slot", "layer", "event"} in host enqueue order,
        kinds copy, read, record, wait, sync, and mark with "name"; None when nothing is traced
    """

    compute: Stream
    copy: Stream
    auxiliary: tuple[Stream, ...]
    synchronisations: int
    exposed_wait_seconds: float
    exposed_wait_by_layer: dict[int, float]
    trace: list[dict] | None

    def event(self, name: str) -> Event:
        """A new event; a name that is taken gets a suffix."""

    def record(self, event: Event, stream: Stream, *, slot: str | None = None, layer: int | None = None) -> None:
        """The event is reached when all work now on `stream` is done. Slot and layer are for the trace."""

    def wait(self, stream: Stream, event: Event, *, slot: str | None = None, layer: int | None = None) -> None:
        """Work enqueued on `stream` from now on runs after the event's latest record."""

    def wait_all(self, stream: Stream, events: Mapping[str, Event], layer: int) -> None:
        """`wait` for the event of each of a layer's slots, whose exposed wait is measured as one."""

    def enqueue(
        self,
        stream: Stream,
        fn: Callable[[], None] | None,
        *,
        kind: str = "copy",
        slot: str | None = None,
        layer: int | None = None,
        nbytes: int = 0,
    ) -> None:
        """Run `fn` in stream order; None only traces the op. kind: copy or read.

        On CUDA `fn` only enqueues work: a prepared submission has `submit(stream)` and is given the driver's stream,
        anything else is called with `stream` as torch's current one.
        """

    def mark(self, name: str, layer: int | None = None) -> None:
        """Put a point of the host's program into the trace."""

    def note_read(self, slot: str, layer: int) -> None:
        """A read window of compute opens here, or closes: a `read` in the trace. See [Note: reads in a trace]."""

    def stamp_trace(self) -> list[dict]:
        """The trace once all work is done, each op with `t0` and `t1` in seconds of time.perf_counter."""

    def synchronize(self) -> None:
        """Wait for all work; counted. Raises what a piece of work raised."""

    def drain(self) -> BaseException | None:
        """Wait for all work, for teardown: not counted, and what work raised is returned."""

    def recover(self) -> BaseException | None:
        """As `drain`, and the error of work is forgotten, so that the device can be used for something else."""

    def close(self) -> None:
        """Finish all work and end the streams."""
