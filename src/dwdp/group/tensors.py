"""Tensors between ranks that step together: gloo on loopback, ordered, with deadlines and named failures.

Used in every MoE layer of an attention-DP instance. Nothing is reduced here: what the ranks computed is handed
over as it is and added by the receiver, so that the order of a sum is the receiver's and the same every time.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo

from dwdp.errors import DwdpError, GroupError, GroupTimeoutError
from dwdp.group.comm import Group

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.02
CAUSE_SECONDS = 1.0
"""How long a rank whose exchange broke looks for the reason: a death or an abort is known a moment later."""


class TensorExchange:
    """The ranks of a joined group, as gloo's. Context manager; `close` is idempotent.

    Every rank calls the same methods in the same order. They raise RankDiedError naming a rank that died,
    GroupError with what a rank aborted the group for, GroupTimeoutError at the group's deadline. After any of
    these the exchange is broken and can only be closed.
    """

    def __init__(self, group: Group) -> None:
        """Collective. DwdpError when the ranks are on several hosts."""
        if group.several_hosts:
            raise DwdpError(f"attention_dp steps ranks of one host only, and these span {group.several_hosts}")
        self.group, self.broken, self.closed = group, False, False
        store, self._served = group.exchange_store()
        self._gloo = self._connect(store)

    def _connect(self, store: dist.Store) -> Any:
        """In a thread: gloo waits for every rank until the deadline, also for one that is known to be dead."""
        future: Future = Future()

        def connect() -> None:
            try:
                options = ProcessGroupGloo._Options()
                options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
                options._timeout = datetime.timedelta(seconds=self.group.timeout_seconds)
                future.set_result(ProcessGroupGloo(store, self.group.rank, self.group.size, options))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=connect, name="dwdp-gloo-connect", daemon=True).start()
        while True:
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                self.group.check_alive()
            except RuntimeError as error:
                raise self._cause(error, "connecting the ranks of the step") from error

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order; all have the same shape and dtype. It goes through the host."""
        sent = mine.cpu()
        parts = [torch.empty_like(sent) for _ in range(self.group.size)]
        self._run("gathering", lambda: self._gloo.allgather([parts], [sent]))
        return [part.to(mine.device) for part in parts]

    def all_to_all(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """rows: [sum(counts), width], in rank order of who gets them -> of every rank what is for this one.

        counts: rows for each rank, the same list on every rank.
        """
        own, size = counts[self.group.rank], self.group.size
        sent = rows.cpu()
        received = sent.new_empty((size * own, rows.shape[1]))
        self._run(
            "handing over",
            lambda: self._gloo.alltoall_base(received, sent, [own] * size, list(counts), dist.AllToAllOptions()),
        )
        return list(received.to(rows.device).view(size, own, rows.shape[1]))

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        if self.broken or self.closed:
            raise GroupError(f"{what}: rank {self.group.rank} has left the step")
        try:
            start().wait()
        except RuntimeError as error:
            self.broken = True
            raise self._cause(error, what) from error

    def _cause(self, error: RuntimeError, what: str) -> GroupError:
        """Who is to blame; gloo itself names an address."""
        until = time.monotonic() + CAUSE_SECONDS
        while True:
            try:
                self.group.check_alive()
            except GroupError as cause:
                return cause
            if time.monotonic() > until:
                break
            time.sleep(POLL_SECONDS)
        text = str(error).partition("\n")[0]
        where = f"{what} of a step of attention-DP rank {self.group.rank} of {self.group.size}"
        if "timed out" in text.lower():
            seconds = self.group.timeout_seconds
            return GroupTimeoutError(
                f"{where}: a rank did not answer within {seconds:g} s (the deadline is DWDP_RENDEZVOUS_TIMEOUT_S)"
            )
        return GroupError(f"{where} failed: a rank left ({text})")

    def abort(self, reason: str) -> None:
        """This rank cannot go on: the others, who wait for it, raise with the reason. Idempotent; never raises."""
        if not self.broken and not self.closed:
            self.broken = True
            self.group.abort(reason)  # before the connections end, so that it is there to be found
            self.close()

    def leave(self, timeout_seconds: float) -> None:
        """Waits (bounded) until every living rank leaves, so that nobody's last rows are cut off; then closes."""
        try:
            if not self.broken and not self.closed:
                self.group.barrier("leaving the step", timeout_seconds=timeout_seconds, skip_dead=True)
        except GroupError:
            logger.exception("rank %d leaves the step without the others", self.group.rank)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the connections."""
        if self.closed:
            return
        self.closed = True
        try:
            self._gloo.shutdown()
        except Exception:
            logger.exception("rank %d could not end its exchange", self.group.rank)
        self._gloo = self._served = None

    def __enter__(self) -> TensorExchange:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
