"""The group over a torch store (TCPStore between processes, HashStore between threads), and such stores
themselves."""

from __future__ import annotations

import datetime
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import torch.distributed as dist

from dwdp import env
from dwdp.errors import GroupError, GroupTimeoutError
from dwdp.group.collectives import PROGRESS_SECONDS
from dwdp.group.comm import Group
from dwdp.group.place import LOOK_SECONDS, Place
from dwdp.group.posts import Abort, Deadline, Post
from dwdp.group.ranks import Host
from dwdp.group.store_client import HOST_LOOK_SECONDS, StoreClient

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.0002
LONGEST_PAUSE_SECONDS = 0.02
LEAVE_SECONDS = 5.0
"""How long the rank that hosts the store waits at its close for the others to read their last answers."""
ABORTED_LEAVE_SECONDS = 1.0
"""The same when the group was aborted: who still waits reads why at once, and who is missing may never come."""

# [Note: a dead rank's last message]
# TCPStore sends a `set` without waiting for an answer, so a rank's last post may reach the store a moment
# after its sockets said that it died. All survivors must see it the same way, or they would go on with
# different sequence numbers; so a death counts against a collective only when the post is still missing after
# this long.
LAST_MESSAGE_SECONDS = 0.2

_encode_post = msgspec.msgpack.Encoder().encode
_decode_post = msgspec.msgpack.Decoder(Post).decode


class StoreGroup(Group):
    """A group of `size` ranks that meet in `store`.

    Several groups share a store when their names differ; a name is used once in a store's life. host_rank:
    the rank whose process serves the store (errors name it), None when another process does. See `Group` for
    the rest.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        name: str = "dwdp",
        timeout_seconds: float | None = None,
        socket_dir: str | None = None,
        token: str | None = None,
        host: Host | None = None,
        host_rank: int | None = None,
    ) -> None:
        super().__init__(
            rank, size, name=name, timeout_seconds=timeout_seconds, socket_dir=socket_dir, token=token, host=host
        )
        self._store = StoreClient(store, host_rank, lambda: host_rank in self._gone)
        self._host_rank = host_rank
        self._posted: list[str] = []

    def dense_group(self) -> StoreGroup:
        return StoreGroup(
            self._store.clone(Deadline(self.timeout_seconds, "dense group")),
            self.rank,
            self.size,
            name=f"{self.name}-dense",
            timeout_seconds=self.timeout_seconds,
            socket_dir=self._socket_dir,
            token=self._token,
            host=self.host if self._host_given else None,
            host_rank=self._host_rank,
        )

    def exchange_store(self) -> tuple[dist.Store, None]:
        store = self._store.clone(Deadline(self.timeout_seconds, "exchange"))
        return dist.PrefixStore(f"{self.name}/exchange", store), None

    def _key(self, *parts: object) -> str:
        return "/".join((self.name, *map(str, parts)))

    def _collect(self, post: Post, deadline: Deadline, skip_gone: bool) -> list[Post | None]:
        keys = [self._key(self._phase, post.number, rank) for rank in range(self.size)]
        self._store.call("set", keys[self.rank], _encode_post(post), deadline=deadline)
        self._posted.append(keys[self.rank])
        present = self._wait(keys, post, deadline, skip_gone)
        posts: list[Post | None] = [None] * self.size
        values = self._store.get_all([keys[rank] for rank in present], deadline)
        for rank, value in zip(present, values):
            posts[rank] = _decode_post(value)
        # Everybody has handed in this one, so everybody has read the one before: the store does not grow.
        while len(self._posted) > 1:
            self._store.call("delete_key", self._posted.pop(0), deadline=deadline)
        return posts

    def _wait(self, keys: list[str], post: Post, deadline: Deadline, skip_gone: bool) -> list[int]:
        """-> the ranks whose keys are there: all of them, less those that are gone when `skip_gone`."""
        wanted = list(range(self.size))
        gone_since: dict[int, float] = {}
        pause, next_progress, next_look = FIRST_PAUSE_SECONDS, PROGRESS_SECONDS, LOOK_SECONDS
        while not self._store.call("check", [keys[rank] for rank in wanted], deadline=deadline):
            self._raise_if_aborted(deadline, post)
            for rank in sorted(self._gone.intersection(wanted)):
                now = time.monotonic()
                if now - gone_since.setdefault(rank, now) < LAST_MESSAGE_SECONDS:
                    continue  # [Note: a dead rank's last message]
                if self._store.call("check", [keys[rank]], deadline=deadline):
                    continue
                if not skip_gone:
                    self._peers.raise_if_gone(rank, f"{post.tag!r} of group {self.name!r}")
                wanted.remove(rank)
            if not self._connected and deadline.elapsed > next_look:
                next_look = deadline.elapsed + LOOK_SECONDS
                if self._host_rank not in (None, self.rank, *self._places):
                    self._find_place(self._host_rank, deadline)  # nobody could be asked when it is gone
                self._look_for_dead(self._missing(keys, wanted, deadline), post, deadline)
            if deadline.passed:
                if missing := self._missing(keys, wanted, deadline):  # else they came at the last moment
                    self._raise_timeout(missing, post, deadline)
            if deadline.elapsed > next_progress:
                next_progress += PROGRESS_SECONDS
                self._log_waiting(self._missing(keys, wanted, deadline), post, deadline)
            time.sleep(min(pause, deadline.remaining))
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        # Also now: the last rank to come finds everything there, and the others may have given it up before.
        self._raise_if_aborted(deadline, post)
        return wanted

    def _missing(self, keys: list[str], wanted: list[int], deadline: Deadline) -> list[int]:
        return [rank for rank in wanted if not self._store.call("check", [keys[rank]], deadline=deadline)]

    def _publish(self, abort: Abort) -> None:
        try:
            text = msgspec.json.encode(abort).decode()
            self._store.call("compare_set", self._key(self._phase, "abort"), "", text, deadline=Deadline(1.0, "abort"))
        except Exception as error:
            logger.warning("rank %d could not tell its group that it failed: %s", self.rank, error)

    def _find_abort(self, deadline: Deadline) -> Abort | None:
        key = self._key(self._phase, "abort")
        if not self._store.call("check", [key], deadline=deadline):
            return None
        return msgspec.json.decode(self._store.call("get", key, deadline=deadline), type=Abort)

    def _announce(self, deadline: Deadline) -> None:
        if self._store.call("check", [self._key("done")], deadline=deadline):
            self._refuse(f"{self.info} came too late: the group {self.name!r} has finished its setup")
        text = msgspec.json.encode(self._place).decode()
        holder = self._store.call("compare_set", self._key("rank", self.rank), "", text, deadline=deadline)
        if holder.decode() != text:
            other = msgspec.json.decode(holder, type=Place)
            self._refuse(
                f"{self.info} is refused: pid {other.pid} on {other.host} is rank {self.rank} of "
                f"the group {self.name!r} already"
            )

    def _find_place(self, rank: int, deadline: Deadline) -> Place | None:
        if rank in self._places:
            return self._places[rank]
        key = self._key("rank", rank)
        if not self._store.call("check", [key], deadline=deadline):
            return None
        place = msgspec.json.decode(self._store.call("get", key, deadline=deadline), type=Place)
        self._places[rank] = place
        return place

    def _own_address(self) -> str | None:
        """The one by which this rank reaches the store: whoever shares the store can reach it too."""
        return self._store.own_address() or super()._own_address()

    def _refuse_late_joiners(self, deadline: Deadline) -> None:
        self._store.call("set", self._key("done"), b"1", deadline=deadline)

    def _release(self) -> None:
        try:
            if self._host_rank is None or self._store.in_process:
                pass
            elif self._host_rank != self.rank:
                self._store.call("set", self._key("closed", self.rank), b"1", deadline=Deadline(1.0, "close"))
            else:
                self._wait_for_the_others()
        except Exception as error:
            # The store's host may be the first to go.
            logger.debug("rank %d left without telling the store: %s", self.rank, error)
        finally:
            self._store.close()

    def _wait_for_the_others(self) -> None:
        """The store ends with this process; whoever joined may still have to read its last answer from it."""
        deadline = Deadline(LEAVE_SECONDS if self._aborted is None else ABORTED_LEAVE_SECONDS, "close")
        for rank in range(self.size):
            joined = self._store.call("check", [self._key("rank", rank)], deadline=deadline)
            while joined and rank != self.rank and rank not in self._gone and not deadline.passed:
                if self._store.call("check", [self._key("closed", rank)], deadline=deadline):
                    break
                time.sleep(0.005)


def host_store(host: str = "127.0.0.1", port: int = 0) -> tuple[dist.TCPStore, int]:
    """Serves a TCPStore on exactly this address: (store, port). It lives as long as the returned object.

    port: 0 for a free one. Raises GroupError naming the address when it cannot be bound.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        numeric, port = listener.getsockname()[:2]
        # Without a way to the address, as when loopback is down, TCPStore's own attempts take minutes.
        socket.create_connection((numeric, port), timeout=5.0).close()
    except OSError as error:
        if listener is not None:
            listener.close()
        raise GroupError(f"cannot serve the group's store at {host}:{port}: {error.strerror or error}") from error
    # A plain TCPStore would listen on every address of the machine.
    try:
        store = dist.TCPStore(
            numeric,
            port,
            None,
            is_master=True,
            timeout=datetime.timedelta(seconds=60),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise GroupError(f"cannot serve the group's store at {host}:{port}: {reason}") from error
    return store, port


def connect_store(
    port: int,
    host: str = "127.0.0.1",
    *,
    timeout_seconds: float | None = None,
    served_by: str = "the front end",
    check: Callable[[], None] = lambda: None,
) -> dist.TCPStore:
    """A client of the store at `host:port`, tried again until `timeout_seconds` (None:
    DWDP_RENDEZVOUS_TIMEOUT_S) have passed.

    check: called between attempts, ends the wait by raising. Raises GroupTimeoutError naming address and
    `served_by`.
    """
    deadline = Deadline(env.rendezvous_timeout_seconds() if timeout_seconds is None else timeout_seconds)
    next_progress, pause = PROGRESS_SECONDS, 0.005
    while True:
        try:
            # Asked by hand first: TCPStore's own attempts overrun their timeout and write to stderr.
            with socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline.remaining))):
                break
        except OSError as error:
            reason = error.strerror or str(error)
        check()
        if deadline.passed:
            raise GroupTimeoutError(
                f"{served_by} does not serve the group's store at {host}:{port} within "
                f"{deadline.seconds:g} s: {reason} (the deadline is DWDP_RENDEZVOUS_TIMEOUT_S)"
            )
        if deadline.elapsed > next_progress:
            next_progress += PROGRESS_SECONDS
            logger.info(
                "waited %.0f of %.0f s for %s to serve the group's store at %s:%d",
                deadline.elapsed,
                deadline.seconds,
                served_by,
                host,
                port,
            )
        time.sleep(min(pause, deadline.remaining))
        pause = min(pause * 1.5, 0.25)
    seconds = max(1.0, min(60.0, deadline.remaining))
    future: Future = Future()

    def connect() -> None:
        try:
            future.set_result(
                dist.TCPStore(
                    socket.gethostbyname(host) if ":" not in host else host,
                    port,
                    None,
                    is_master=False,
                    timeout=datetime.timedelta(seconds=seconds),
                    wait_for_workers=False,
                )
            )
        except BaseException as error:
            future.set_exception(error)

    # In a thread: TCPStore's greeting has no deadline, and whoever listens there may never answer it.
    threading.Thread(target=connect, name="dwdp-store-connect", daemon=True).start()
    text = f"{served_by} does not serve a store at {host}:{port}"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return future.result(min(HOST_LOOK_SECONDS, max(0.0, end - time.monotonic())))
        except TimeoutError:
            check()
        except RuntimeError as error:
            raise GroupTimeoutError(f"{text}: {str(error).partition(chr(10))[0]}") from error
        if not _listens(host, port):
            raise GroupError(f"{served_by}, which served the group's store at {host}:{port}, died or left")
    raise GroupTimeoutError(f"{text}: something else listens there and did not answer within {seconds:g} s")


def _listens(host: str, port: int) -> bool:
    """False when the machine says that nobody does."""
    try:
        socket.create_connection((host, port), timeout=HOST_LOOK_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True


def open_store(rank: int, host: str, port: int, *, timeout_seconds: float | None = None) -> dist.TCPStore:
    """The store of independent processes: rank 0 serves it at `host:port`, the others connect.

    Give such groups `host_rank=0`. Raises GroupError naming the address, GroupTimeoutError naming rank 0.
    """
    if rank == 0:
        return host_store(host, port)[0]
    return connect_store(port, host, timeout_seconds=timeout_seconds, served_by="rank 0")


def publish_abort(store: dist.Store, name: str, reason: str, *, dead_rank: int | None = None) -> None:
    """Ends the setup of the group `name` from outside, as a front end does when a rank's process is gone.

    dead_rank: the rank that died; the others then raise RankDiedError. Raises RuntimeError when the store is
    gone.
    """
    abort = Abort("failed" if dead_rank is None else "died", dead_rank, reason)
    store.compare_set(f"{name}/setup/abort", "", msgspec.json.encode(abort).decode())
