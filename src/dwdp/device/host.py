"""Streams and events of the host: copies run in a worker thread beside the compute of the calling thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Mapping

from dwdp.errors import DwdpError

logger = logging.getLogger(__name__)

# A worker's torch.set_num_threads(1) also sets what threads begin with that are started later. The thread
# that makes workers puts its own number back; the lock keeps another one from reading the 1 in between.
_thread_count_lock = threading.Lock()

IDLE_POLL_SECONDS = 1.0
THROTTLE_SLACK_SECONDS = 0.005  # late by this much is made up for; a copy slower than the throttle is not


class Ticket:
    """One record of an event: complete once, waited for by any number of threads. A lock, so it is cheap."""

    __slots__ = ("done", "_lock")

    def __init__(self) -> None:
        self.done = False
        self._lock = allocate_lock()
        self._lock.acquire()

    def complete(self) -> None:
        self.done = True
        self._lock.release()

    def wait(self) -> None:
        with self._lock:
            pass


DONE = Ticket()
DONE.complete()


class HostEvent:
    """See [Note: events] in device.py."""

    __slots__ = ("name", "ticket")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ticket = DONE  # never recorded: nothing to wait for

    def query(self) -> bool:
        """Whether the latest record was reached."""
        return self.ticket.done


class CallerStream:
    """A stream whose work is the calling thread itself: it has always finished all it was given."""

    is_worker = False

    def __init__(self, device: HostDevice, name: str) -> None:
        self.device, self.name = device, name

    def run(self, fn: Callable[[], None] | None, nbytes: int, op: dict | None) -> None:
        start = time.perf_counter()
        if fn is not None:
            fn()
        _stamp(op, start)

    def record(self, op: dict | None) -> Ticket:
        _stamp(op, time.perf_counter())
        return DONE

    def block(self, ticket: Ticket, layer: int | None, op: dict | None) -> None:
        start = time.perf_counter()
        if not ticket.done:
            ticket.wait()
            _stamp(op, start, self.device._exposed(layer, start))
        else:
            _stamp(op, start, start)

    def close(self) -> None:
        pass


class WorkerStream:
    """A stream that is a thread with a queue. After an error its work is skipped; records still complete."""

    is_worker = True

    def __init__(self, device: HostDevice, name: str, bytes_per_second: float | None = None) -> None:
        self.device, self.name = device, name
        self._seconds_per_byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._free_at = 0.0  # when the throttled link has moved all bytes so far
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._ready = threading.Event()
        self._owner = threading.current_thread()
        # Not a daemon: a daemon thread may be stopped inside a copy while the memory goes away.
        self._thread = threading.Thread(target=self._main, name=f"dwdp-{name}", daemon=False)
        self._thread.start()
        self._ready.wait()

    # called by the host

    def run(self, fn: Callable[[], None] | None, nbytes: int, op: dict | None) -> None:
        self._queue.put((self._run, fn, nbytes, op, time.perf_counter()))

    def record(self, op: dict | None) -> Ticket:
        ticket = Ticket()
        self._queue.put((self._complete, ticket, op))
        return ticket

    def block(self, ticket: Ticket, layer: int | None, op: dict | None) -> None:
        if ticket.done and op is None:
            return
        # No deadlock: the ticket's record was enqueued before this wait, so waits only point backwards
        # in the host's enqueue order.
        self._queue.put((self._block, ticket, layer, op))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    # in the thread

    def _main(self) -> None:
        import torch

        torch.get_num_threads()  # a thread's first use takes the process's number, and would undo the 1 later
        torch.set_num_threads(1)  # compute has the cores
        self._ready.set()
        while True:
            try:
                item = self._queue.get(timeout=IDLE_POLL_SECONDS)
            except queue.Empty:
                # A program that ends without close() must end.
                if threading.main_thread().is_alive() or self._owner.is_alive():
                    continue
                return
            if item is None:
                return
            item[0](*item[1:])
            del item  # its closure holds tensors

    def _run(self, fn: Callable[[], None] | None, nbytes: int, op: dict | None, enqueued: float) -> None:
        start = time.perf_counter()
        if fn is not None and self.device.error is None:
            try:
                fn()
            except BaseException as error:
                self.device._keep_error(error, self.name, op)
            if self._seconds_per_byte:
                self._throttle(enqueued, nbytes)
        _stamp(op, start)

    def _throttle(self, enqueued: float, nbytes: int) -> None:
        """Sleep until a link of that speed would have moved the bytes.

        The clock runs on from the previous copy's end and not from now, so sleeping a little too long
        does not add up.
        """
        now = time.perf_counter()
        end = max(enqueued, self._free_at) + nbytes * self._seconds_per_byte
        self._free_at = max(end, now - THROTTLE_SLACK_SECONDS)
        if end > now:
            time.sleep(end - now)

    def _complete(self, ticket: Ticket, op: dict | None) -> None:
        _stamp(op, time.perf_counter())
        ticket.complete()

    def _block(self, ticket: Ticket, layer: int | None, op: dict | None) -> None:
        start = end = time.perf_counter()
        if not ticket.done:
            ticket.wait()
            end = self.device._exposed(layer, start) if self is self.device.compute else time.perf_counter()
            self._free_at = max(self._free_at, end)  # the link was idle meanwhile
        _stamp(op, start, end)


class HostDevice:
    """Streams of one rank on the host. A context manager; `close()` finishes the work and joins the threads.

    copy_bytes_per_second: slows the copy stream down to a link of that speed, without burning a core
    compute_worker: compute is a worker too (waits do not block the host); else it is the calling thread
    trace: keep ops, in the neutral form with `t0` and `t1` (seconds of time.perf_counter) and `nbytes`
    num_aux: number of auxiliary streams, each a worker

    One thread calls it. An error of work in a worker is kept for good: no worker runs further work, all
    events complete, and the next `wait` and `synchronize` raise it. Work on a compute stream that is the
    calling thread raises at once.
    """

    def __init__(
        self,
        *,
        copy_bytes_per_second: float | None = None,
        compute_worker: bool = False,
        trace: bool = False,
        num_aux: int = 0,
    ) -> None:
        import torch

        if copy_bytes_per_second is not None and copy_bytes_per_second <= 0:
            raise ValueError(f"copy_bytes_per_second is {copy_bytes_per_second}, it must be positive")
        if num_aux < 0:
            raise ValueError(f"num_aux is {num_aux}, it must not be negative")
        self.synchronisations = 0
        self.exposed_wait_seconds = 0.0
        self.exposed_wait_by_layer: dict[int, float] = {}
        self.trace: list[dict] | None = [] if trace else None
        self.error: BaseException | None = None
        self._error_lock = threading.Lock()
        self._closed = False
        self._event_names: dict[str, int] = {}
        self._streams: list = []
        with _thread_count_lock:
            num_threads = torch.get_num_threads()
            try:
                self.copy = self._add(WorkerStream(self, "copy", copy_bytes_per_second))
                self.auxiliary = tuple(self._add(WorkerStream(self, f"aux{i}")) for i in range(num_aux))
                self.compute = self._add((WorkerStream if compute_worker else CallerStream)(self, "compute"))
            except BaseException:
                self.close()
                raise
            finally:
                torch.set_num_threads(num_threads)

    def event(self, name: str) -> HostEvent:
        return HostEvent(unique_name(name, self._event_names))

    def record(self, event: HostEvent, stream, *, slot: str | None = None, layer: int | None = None) -> None:
        self._check(stream)
        event.ticket = stream.record(self._op(stream.name, "record", slot, layer, event.name))

    def wait(self, stream, event: HostEvent, *, slot: str | None = None, layer: int | None = None) -> None:
        self._check(stream)
        stream.block(event.ticket, layer, self._op(stream.name, "wait", slot, layer, event.name))
        if self.error is not None:
            raise self.error

    def wait_all(self, stream, events: Mapping[str, HostEvent], layer: int) -> None:
        for slot, event in events.items():
            self.wait(stream, event, slot=slot, layer=layer)

    def enqueue(
        self,
        stream,
        fn: Callable[[], None] | None,
        *,
        kind: str = "copy",
        slot: str | None = None,
        layer: int | None = None,
        nbytes: int = 0,
    ) -> None:
        self._check(stream)
        check_kind(kind)
        op = self._op(stream.name, kind, slot, layer, None)
        if op is not None:
            op["nbytes"] = nbytes
        stream.run(fn, nbytes, op)

    def mark(self, name: str, layer: int | None = None) -> None:
        if self.trace is not None:
            op = self._op("host", "mark", None, layer, None)
            op["name"] = name
            _stamp(op, time.perf_counter())

    def note_read(self, slot: str, layer: int) -> None:
        if self.trace is not None:
            self.enqueue(self.compute, None, kind="read", slot=slot, layer=layer)

    def stamp_trace(self) -> list[dict]:
        """The trace, each op with `t0` and `t1`; waits for all work."""
        if self.trace is None:
            raise DwdpError("this device was made without a trace")
        for ticket in [stream.record(None) for stream in self._streams]:
            ticket.wait()
        return self.trace

    def synchronize(self) -> None:
        self.synchronisations += 1
        self._wait_for_all()
        if self.error is not None:
            raise self.error

    def drain(self) -> BaseException | None:
        self._wait_for_all()
        return self.error

    def recover(self) -> BaseException | None:
        """As `drain`, and the error of work is forgotten: whoever enqueued it has given up what it was for."""
        error = self.drain()
        with self._error_lock:
            self.error = None
        return error

    def close(self) -> None:
        """Finish all work and join the threads. Idempotent; an error of work is logged, not raised."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.close()
        if self.error is not None:
            logger.error("work of a closed device had failed", exc_info=self.error)

    def __enter__(self) -> HostDevice:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # helpers

    def _add(self, stream):
        self._streams.append(stream)
        return stream

    def _check(self, stream) -> None:
        if stream.device is not self:
            raise ValueError(f"stream {stream.name} belongs to another device")
        if self._closed:
            raise DwdpError(f"the device of stream {stream.name} is closed")

    def _wait_for_all(self) -> None:
        op = self._op("host", "sync", None, None, None)
        start = time.perf_counter()
        if not self._closed:  # a closed device has no work left
            for ticket in [stream.record(None) for stream in self._streams]:
                ticket.wait()
        _stamp(op, start)

    def _exposed(self, layer: int | None, start: float) -> float:
        """Count compute's wait since `start`; returns its end. Only the compute stream calls this."""
        end = time.perf_counter()
        self.exposed_wait_seconds += end - start
        if layer is not None:
            self.exposed_wait_by_layer[layer] = self.exposed_wait_by_layer.get(layer, 0.0) + end - start
        return end

    def _keep_error(self, error: BaseException, stream: str, op: dict | None) -> None:
        with self._error_lock:
            if self.error is None:
                where = "" if op is None else f": {op['kind']} of slot {op['slot']}, layer {op['layer']}"
                error.add_note(f"in work enqueued on stream {stream}{where}")
                self.error = error

    def _op(self, stream: str, kind: str, slot: str | None, layer: int | None, event: str | None):
        if self.trace is None:
            return None
        op = {"stream": stream, "kind": kind, "slot": slot, "layer": layer, "event": event}
        self.trace.append(op)
        return op


def _stamp(op: dict | None, start: float, end: float | None = None) -> None:
    if op is not None:
        op["t0"], op["t1"] = start, time.perf_counter() if end is None else end


def check_kind(kind: str) -> None:
    """Refuse a kind of work that traces do not know."""
    if kind not in ("copy", "read"):
        raise ValueError(f"work is of kind copy or read, not {kind!r}")


def unique_name(name: str, taken: dict[str, int]) -> str:
    """`name`, or `name#2`, `name#3`, ... when it was given out before: traces know events by name."""
    count = taken[name] = taken.get(name, 0) + 1
    return name if count == 1 else f"{name}#{count}"
