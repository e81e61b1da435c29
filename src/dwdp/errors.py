"""Exceptions that a user meets: each says what was asked, the numbers, and what to do."""

from __future__ import annotations


class DwdpError(RuntimeError):
    """Base of the errors that are no fault of an argument."""


class ConfigError(ValueError):
    """A setting, file or variable that cannot be used; the message names it and its value."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be served: missing, extra or misshapen tensors, truncated files."""


class RequestError(ValueError):
    """A request that is refused; the message names the field and the numbers."""


class GroupError(DwdpError):
    """A collective that failed; the message names ranks, tag and phase."""


class GroupTimeoutError(GroupError):
    """The deadline of a collective passed; the message names the missing ranks."""


class RankDiedError(GroupError):
    """A rank of the group is dead.

    `rank` is the dead rank's number.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self):
        return (type(self), (self.rank, self.args[0]))


class MemoryDomainError(DwdpError):
    """A call of a memory domain failed; the message names the call, its result and the cure."""


class MemoryBudgetError(MemoryDomainError):
    """A budget of mappings or descriptors would be passed; the message has both numbers."""


class ModelMemoryError(DwdpError):
    """The weights that a rank loads whole do not fit its GPU; the message has their bytes and the remedies."""


class PrefetchRingMemoryError(DwdpError):
    """The prefetch ring does not fit the free memory.

    slot_nbytes: bytes of each slot; free_nbytes: bytes free before the first page. Picklable.
    """

    def __init__(self, slot_nbytes: list[int], free_nbytes: int, remedies: list[str]) -> None:
        self.slot_nbytes, self.free_nbytes, self.remedies = list(slot_nbytes), free_nbytes, list(remedies)
        total = sum(self.slot_nbytes)
        super().__init__(
            f"the expert prefetch ring needs {total} bytes ({len(self.slot_nbytes)} slots of "
            f"{', '.join(map(str, self.slot_nbytes))}) but {free_nbytes} bytes are free; remedies: "
            + "; ".join(self.remedies)
        )

    def __reduce__(self):
        return (type(self), (self.slot_nbytes, self.free_nbytes, self.remedies))


class VerificationError(DwdpError):
    """Bytes that were copied differ from their owner's; names peer, layer and first byte."""


class ModelReleasedError(DwdpError):
    """A forward on a model whose weights were released."""


class ModelUnusableError(DwdpError):
    """A forward on, or a change of, a model that a failed setup or weight update left behind."""
