"""What a rank counts at run time; one object, shared by the expert and the dense runtime."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Since setup. Nothing here is reset by a forward.

    copies: layer gathers enqueued, E and L alike; copied_bytes: their bytes; demand_fetches: layers that were
    reached before anything had enqueued them; fences: copies that waited for every stream because their slot
    was being read; barriers: write-after-read barriers after an abort; restarts: restarts of the expert
    sequence; synchronisations: host waits for the device; exposed_wait_seconds: time that compute waited for
    copies; forwards: completed forwards; primed_forwards: those whose first layers' copies the forward before
    had issued.
    """

    copies: int = 0
    copied_bytes: int = 0
    demand_fetches: int = 0
    fences: int = 0
    barriers: int = 0
    restarts: int = 0
    synchronisations: int = 0
    exposed_wait_seconds: float = 0.0
    forwards: int = 0
    primed_forwards: int = 0

    def as_dict(self) -> dict[str, int | float]:
        """The counters by name."""
        return asdict(self)
