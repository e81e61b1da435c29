"""A torch store as a group uses it: operations that end by a deadline, errors that name the store's host."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from dwdp.errors import GroupError, GroupTimeoutError, RankDiedError
from dwdp.group.posts import Deadline

logger = logging.getLogger(__name__)

HOST_LOOK_SECONDS = 0.5
"""How often a rank that waits for the store's answer looks whether the store's host is dead."""


class StoreClient:
    """A torch store whose operations end by a deadline and whose errors name the store's host.

    TCPStore's own calls have no deadline when the host is frozen, so they run in a thread. A HashStore has no
    host and is called directly. is_host_gone: asked while a call runs.
    """

    def __init__(self, store: dist.Store, host_rank: int | None, is_host_gone: Callable[[], bool]) -> None:
        self._store, self._host_rank, self._is_host_gone = store, host_rank, is_host_gone
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self.in_process = isinstance(store, dist.HashStore)
        self._address = (store.host, store.port) if isinstance(store, dist.TCPStore) else None
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not self.in_process:
            self._thread = threading.Thread(target=self._work, name="dwdp-store", daemon=True)
            self._thread.start()

    @property
    def _host(self) -> str:
        return "a process outside the group" if self._host_rank is None else f"rank {self._host_rank}"

    def call(self, method: str, *args: Any, deadline: Deadline) -> Any:
        """`store.method(*args)`. Raises GroupTimeoutError when the host does not answer by the deadline (at
        least 1 s), RankDiedError (GroupError for a host outside the group) when it is gone."""
        operation = getattr(self._store, method)
        try:
            if self._thread is None:
                return operation(*args)
            future: Future = Future()
            self._jobs.put((operation, args, future))
            return self._wait_for(future, max(1.0, deadline.remaining))
        except TimeoutError:
            seconds = max(1.0, deadline.seconds)
            raise GroupTimeoutError(
                f"the group's store, served by {self._host}, did not answer within {seconds:g} s in {deadline.what!r}"
            ) from None
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            text = f"the group's store is gone: {self._host}, which serves it, died or left ({reason})"
            if self._host_rank is not None:
                raise RankDiedError(self._host_rank, text) from error
            raise GroupError(text) from error

    def _wait_for(self, future: Future, seconds: float) -> Any:
        """A store whose host vanished never answers; the peers' sockets may know that it is gone."""
        end = time.monotonic() + seconds
        while True:
            remaining = end - time.monotonic()
            try:
                return future.result(max(0.0, min(HOST_LOOK_SECONDS, remaining)))
            except TimeoutError:
                if future.done():
                    return future.result()  # it came just now, or the store itself says that it took too long
                if remaining <= HOST_LOOK_SECONDS:
                    raise
            if self._is_host_gone():
                raise RuntimeError("it does not answer any more")

    def own_address(self) -> str | None:
        """The address of this machine that a connection to the store has, None for a store without one."""
        if self._address is None:
            return None
        host, port = self._address
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(where)  # sends nothing
                return sock.getsockname()[0]
        except OSError as error:
            logger.debug("no address of this machine leads to the store at %s:%s: %s", host, port, error)
            return None

    def clone(self, deadline: Deadline) -> dist.Store:
        """A connection of its own to the same store: a call that waits on one does not hold up the other. Raises as
        `call` does."""
        return self.call("clone", deadline=deadline)

    def get_all(self, keys: list[str], deadline: Deadline) -> list[bytes]:
        if self._store.has_extended_api():
            return self.call("multi_get", keys, deadline=deadline)
        return [self.call("get", key, deadline=deadline) for key in keys]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            operation, args, future = job
            try:
                future.set_result(operation(*args))
            except BaseException as error:
                future.set_exception(error)
            del job, operation, args, future

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(1.0)  # a thread that waits for a frozen host ends with the process
            self._thread = None
            self._store = None
