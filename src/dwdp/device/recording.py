"""A device that writes down what it is asked: the input of the race checker and of golden traces."""

from __future__ import annotations

from collections.abc import Callable

from dwdp.device.host import check_kind, unique_name


class RecordedStream:
    def __init__(self, device: RecordingDevice, name: str) -> None:
        self.device, self.name = device, name


class RecordedEvent:
    def __init__(self, name: str) -> None:
        self.name = name


class RecordingDevice:
    """The surface of HostDevice without threads or time.

    execute: run each piece of work at once, in the calling thread; else none is run
    before_op: called with each op before it is recorded or run; what it raises is an abort at that point
    ops (also `trace`): {"stream", "kind", "slot", "layer", "event"}, marks also "name", in enqueue order
    """

    def __init__(
        self, *, execute: bool = False, num_aux: int = 0, before_op: Callable[[dict], None] | None = None
    ) -> None:
        self.ops: list[dict] = []
        self.synchronisations = 0
        self.exposed_wait_seconds = 0.0
        self.exposed_wait_by_layer: dict[int, float] = {}
        self.error = None
        self.before_op = before_op
        self._execute = execute
        self._event_names: dict[str, int] = {}
        self.compute, self.copy = RecordedStream(self, "compute"), RecordedStream(self, "copy")
        self.auxiliary = tuple(RecordedStream(self, f"aux{i}") for i in range(num_aux))

    @property
    def trace(self) -> list[dict]:
        return self.ops

    def event(self, name: str) -> RecordedEvent:
        return RecordedEvent(unique_name(name, self._event_names))

    def record(self, event, stream, *, slot: str | None = None, layer: int | None = None) -> None:
        self._add(stream, "record", slot, layer, event.name)

    def wait(self, stream, event, *, slot: str | None = None, layer: int | None = None) -> None:
        self._add(stream, "wait", slot, layer, event.name)

    def wait_all(self, stream, events, layer: int) -> None:
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
        check_kind(kind)
        self._add(stream, kind, slot, layer, None)
        if self._execute and fn is not None:
            fn()

    def mark(self, name: str, layer: int | None = None) -> None:
        self._add(None, "mark", None, layer, None, name=name)

    def note_read(self, slot: str, layer: int) -> None:
        """Nothing: who drives this device says what is read, kernel by kernel."""

    def stamp_trace(self) -> list[dict]:
        """The ops; there is no time here."""
        return self.ops

    def synchronize(self) -> None:
        self._add(None, "sync", None, None, None)
        self.synchronisations += 1

    def drain(self) -> None:
        self._add(None, "sync", None, None, None)

    recover = drain

    def close(self) -> None:
        pass

    def __enter__(self) -> RecordingDevice:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _add(self, stream, kind: str, slot: str | None, layer: int | None, event: str | None, **more) -> None:
        if stream is not None and stream.device is not self:
            raise ValueError(f"stream {stream.name} belongs to another device")
        op = {
            "stream": "host" if stream is None else stream.name,
            "kind": kind, "slot": slot, "layer": layer, "event": event, **more,
        }  # fmt: skip
        if self.before_op is not None:
            self.before_op(op)
        self.ops.append(op)
