"""The group over MPI (mpi4py), for processes that `mpirun` or `srun` started and that share no store.

[Note: collectives of messages]
A collective is a message of every rank to every other, sent and received without blocking and polled. MPI's
own nonblocking collectives could not leave out a rank that died and could not be given up at a deadline: a
pending one can neither be cancelled nor freed, and the next one would pair with it.

[Note: before a communicator is made]
`MPI_Comm_create_group` has no nonblocking form and waits for ever for a rank that does not come. So the ranks
first tell each other "here" on the parent communicator, and "ready" once they have heard "here" from all; only
then do they go in. A rank that gives up says so there too. Each attempt has a number, so that what an earlier
one left behind is known for what it is; a rank that was not in it fails at its own, and is in step again.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from dwdp.errors import ConfigError, GroupError
from dwdp.group.collectives import PROGRESS_SECONDS
from dwdp.group.comm import Group
from dwdp.group.joining import spans_hosts
from dwdp.group.mpi_world import WITHOUT_MPI, mpi_world
from dwdp.group.place import Place
from dwdp.group.posts import Abort, Deadline, Post
from dwdp.group.ranks import Host

logger = logging.getLogger(__name__)

GROUP_TAG = 0x4456
DENSE_GROUP_TAG = 0x4457
"""Of the group of a standalone dense manager: a rank that disagrees about dense DWDP never pairs with another
group's creation."""
MESSAGE_TAG = 1
"""Of every message on a group's own communicator."""

FIRST_PAUSE_SECONDS = 0.0002
LONGEST_PAUSE_SECONDS = 0.005
LAST_MESSAGE_SECONDS = 0.2
"""How long after its death a rank's last message may still arrive."""
CREATE_SECONDS = 10.0
"""How long MPI may take to make a communicator once every rank is ready."""


class Call(msgspec.Struct, array_like=True, frozen=True):
    """A message on the parent communicator: see [Note: before a communicator is made].

    kind: `here`, `ready` or `gone`. ranks: of the group, as numbers of the parent. abort: why it is gone. place:
    what the rank has announced, if it has.
    """

    kind: str
    attempt: int
    group: str
    ranks: list[int]
    abort: Abort | None = None
    place: Place | None = None


class Posted(msgspec.Struct, tag=1, array_like=True, frozen=True):
    phase: str
    post: Post


class Aborted(msgspec.Struct, tag=2, array_like=True, frozen=True):
    phase: str
    abort: Abort


_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_message = msgspec.msgpack.Decoder(Posted | Aborted).decode


def world_group(rank: int, size: int, **options: Any) -> MpiGroup:
    """The group of all processes that the launcher started, of which this is `rank`. options: of `MpiGroup`.

    Raises ConfigError when MPI says something else.
    """
    comm = mpi_world(options.get("timeout_seconds")).MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (rank, size):
        raise ConfigError(
            f"the launcher started this process as rank {rank} of {size}, but MPI says {comm.Get_rank()} of "
            f"{comm.Get_size()}: mpi4py is linked to another MPI than the launcher's; install mpi4py for that one, "
            + WITHOUT_MPI
        )
    return MpiGroup(**options)


class _Patience:
    """How a poll loop waits: pauses that grow, a word in the log, and the end at the deadline."""

    def __init__(self, group: MpiGroup, post: Post, deadline: Deadline) -> None:
        self.group, self.post, self.deadline = group, post, deadline
        self.pause, self.next_progress = FIRST_PAUSE_SECONDS, PROGRESS_SECONDS

    def wait(self, missing: Sequence[int]) -> None:
        """Raises GroupTimeoutError naming `missing` once the deadline has passed."""
        if self.deadline.passed and missing:
            self.group._raise_timeout(missing, self.post, self.deadline)
        if self.deadline.elapsed > self.next_progress:
            self.next_progress += PROGRESS_SECONDS
            self.group._log_waiting(missing, self.post, self.deadline)
        time.sleep(min(self.pause, self.deadline.remaining))
        self.pause = min(self.pause * 1.5, LONGEST_PAUSE_SECONDS)


def _shown(call: Call) -> str:
    return f"the group {call.group!r} of the processes {', '.join(map(str, call.ranks))}"


class MpiGroup(Group):
    """A group of some ranks of an MPI communicator. See `Group` for the rest.

    parent: an mpi4py communicator of which this process is one (None: MPI_COMM_WORLD). ranks: the group's, as
    numbers of the parent and in the group's order (None: all). tag: on the parent, from 0 to 32767; groups that
    have ranks in common and are made at the same time need different ones.

    Its communicator is made by the first collective, which every rank has to come to. Raises ConfigError when
    mpi4py is missing, GroupTimeoutError when MPI cannot be started, ValueError for ranks without this one.
    """

    def __init__(
        self,
        parent: Any = None,
        *,
        ranks: Sequence[int] | None = None,
        name: str = "dwdp",
        tag: int = GROUP_TAG,
        timeout_seconds: float | None = None,
        socket_dir: str | None = None,
        token: str | None = None,
        host: Host | None = None,
    ) -> None:
        self._mpi = mpi_world(timeout_seconds)
        self._parent = self._mpi.MPI.COMM_WORLD if parent is None else parent
        self._ranks = list(range(self._parent.Get_size())) if ranks is None else list(ranks)
        if self._parent.Get_rank() not in self._ranks:
            raise ValueError(f"rank {self._parent.Get_rank()} of the communicator is not among the ranks {self._ranks}")
        rank = self._ranks.index(self._parent.Get_rank())
        super().__init__(
            rank, len(self._ranks), name=name, timeout_seconds=timeout_seconds, socket_dir=socket_dir, token=token,
            host=host,
        )  # fmt: skip
        self._tag = tag
        self._mpi.used(self._parent)
        self._attempt = self._mpi.next_attempt(self._parent, tag, self._ranks)
        self._comm: Any = None
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        # of each rank, in the order in which it sent them: receives that run, and posts that no collective has used
        self._arriving: list[deque] = [deque() for _ in range(self.size)]
        self._inbox: list[deque[Posted]] = [deque() for _ in range(self.size)]
        self._aborts: dict[str, Abort] = {}
        self._sends: list = []
        self.on_peer_death(self._lose)

    def _lose(self, rank: int) -> None:
        MPI, world = self._mpi.MPI, self._mpi.MPI.COMM_WORLD
        found = MPI.Group.Translate_ranks(self._parent.Get_group(), [self._ranks[rank]], world.Get_group())
        self._mpi.lost.update(one for one in found if one != MPI.UNDEFINED)

    # -- making the communicator: [Note: before a communicator is made]

    def _form(self, deadline: Deadline) -> None:
        if self._comm is not None:
            return
        if self.size > 1:
            calls = self._exchange("here", deadline)
            for rank, call in calls.items():
                theirs, own = _shown(call), _shown(Call("here", 0, self.name, self._ranks))
                if theirs != own:
                    text = f"rank {rank} makes {theirs} while rank {self.rank} makes {own}"
                    self._fail(Abort("mismatch", self.rank, text))
            self._exchange("ready", deadline)
        self._create(max(1.0, min(CREATE_SECONDS, deadline.remaining)))
        self._comm.Set_errhandler(self._mpi.MPI.ERRORS_RETURN)

    def _exchange(self, kind: str, deadline: Deadline) -> dict[int, Call]:
        """Tells every other rank `kind` and waits until it has said the same; -> what each has said."""
        self._tell(Call(kind, self._attempt, self.name, self._ranks, place=self._place))
        calls: dict[int, Call] = {}
        post = Post(0, f"making the communicator, tag {self._tag:#x}", b"")
        patience = _Patience(self, post, deadline)
        while True:
            for rank in self._others:
                call = None if rank in calls else self._hear(rank)
                if call is None or call.attempt != self._attempt:
                    continue
                if call.kind == "gone":
                    self._aborted = call.abort
                    raise call.abort.error(self.name)
                calls[rank] = call
                if call.place is not None:
                    self._places[rank] = call.place
            missing = [rank for rank in self._others if rank not in calls]
            if not missing:
                return calls
            self._look_for_dead(missing, post, deadline)
            patience.wait(missing)

    def _tell(self, call: Call) -> None:
        message = [_encode(call), self._mpi.MPI.BYTE]
        self._mpi.keep([self._parent.Isend(message, self._ranks[rank], self._tag) for rank in self._others])

    def _hear(self, rank: int) -> Call | None:
        found = self._mpi.receive(self._parent, self._ranks[rank], self._tag)
        if found is None:
            return None
        request, buffer, _ = found
        request.Wait()  # a few bytes, which have come
        return _decode_call(buffer)

    def _create(self, seconds: float) -> None:
        made: list = []

        def create() -> None:
            made.append(self._parent.Create_group(self._parent.Get_group().Incl(self._ranks), self._tag))

        if not self._mpi.call(create, seconds):
            text = f"MPI did not make the communicator of the group {self.name!r} within {seconds:g} s"
            self._fail(Abort("timeout", self.rank, text))
        self._comm = made[0]
        self._mpi.used(self._comm)

    # -- collectives: [Note: collectives of messages]

    def _collect(self, post: Post, deadline: Deadline, skip_gone: bool) -> list[Post | None]:
        try:
            self._form(deadline)
            return self._gather(post, deadline, skip_gone)
        except self._mpi.MPI.Exception as error:
            raise GroupError(f"MPI failed in {post.tag!r} of group {self.name!r}: {error}") from error

    def _gather(self, post: Post, deadline: Deadline, skip_gone: bool) -> list[Post | None]:
        posts: list[Post | None] = [None] * self.size
        posts[self.rank] = post
        wanted = set(self._others)
        self._sends += self._send(Posted(self._phase, post))
        gone_since: dict[int, float] = {}
        patience = _Patience(self, post, deadline)
        while True:
            self._raise_if_aborted(deadline, post)
            for rank in list(wanted):
                posts[rank] = self._take(rank, post.number)
                if posts[rank] is not None:
                    wanted.discard(rank)
            # A message that is not through needs this process to go on polling.
            if not self._unsent() and not wanted:
                return posts
            for rank in sorted(self._gone & wanted):
                now = time.monotonic()
                if now - gone_since.setdefault(rank, now) < LAST_MESSAGE_SECONDS:
                    continue
                if not skip_gone:
                    self._peers.raise_if_gone(rank, f"{post.tag!r} of group {self.name!r}")
                wanted.discard(rank)
            self._look_for_dead(sorted(wanted), post, deadline)
            patience.wait(sorted(wanted | self._unsent()))

    def _send(self, message: Posted | Aborted) -> list[tuple[int, Any]]:
        data, gone = [_encode(message), self._mpi.MPI.BYTE], self._gone
        return [(rank, self._comm.Isend(data, rank, MESSAGE_TAG)) for rank in self._others if rank not in gone]

    def _unsent(self) -> set[int]:
        """The living ranks that have not taken everything from this one."""
        self._sends = [(rank, send) for rank, send in self._sends if not self._mpi.is_done(send)]
        return {rank for rank, _ in self._sends} - self._gone

    def _take(self, rank: int, number: int) -> Post | None:
        """The rank's post to collective `number`; what it sent to one that was left by an error is dropped."""
        box = self._inbox[rank]
        while box and (box[0].phase, box[0].post.number) != (self._phase, number):
            if box[0].phase == self._phase and box[0].post.number > number:
                break  # the tags tell
            box.popleft()
        return box.popleft().post if box else None

    def _poll(self) -> None:
        """Takes what has arrived from every rank."""
        if self._comm is None:
            return
        while found := self._mpi.receive(self._comm, self._mpi.MPI.ANY_SOURCE, MESSAGE_TAG):
            request, buffer, source = found
            self._arriving[source].append((request, buffer))
        for rank, arriving in enumerate(self._arriving):
            while arriving and arriving[0][0].Test():
                match _decode_message(arriving.popleft()[1]):
                    case Posted() as posted:
                        self._inbox[rank].append(posted)
                    case Aborted(phase, abort):
                        self._aborts.setdefault(phase, abort)

    def _find_abort(self, deadline: Deadline) -> Abort | None:
        self._poll()
        return self._aborts.get(self._phase)

    def _publish(self, abort: Abort) -> None:
        try:
            if self._comm is None:
                self._tell(Call("gone", self._attempt, self.name, self._ranks, abort))
                return
            # Any thread may abort: these are not among the sends that a collective looks after.
            sends, deadline = [send for _, send in self._send(Aborted(self._phase, abort))], Deadline(1.0, "abort")
            while (sends := [send for send in sends if not self._mpi.is_done(send)]) and not deadline.passed:
                time.sleep(0.001)
            self._mpi.keep(sends)
        except Exception as error:
            logger.warning("rank %d could not tell its group that it failed: %s", self.rank, error)

    # -- other groups and stores of the same ranks

    def dense_group(self) -> MpiGroup:
        return MpiGroup(
            self._parent,
            ranks=self._ranks,
            name=f"{self.name}-dense",
            tag=DENSE_GROUP_TAG,
            timeout_seconds=self.timeout_seconds,
            socket_dir=self._socket_dir,
            token=self._token,
            host=self.host if self._host_given else None,
        )

    def exchange_store(self) -> tuple[Any, Any]:
        """MPI has no store, so rank 0 serves one, on loopback alone."""
        from dwdp.group.backends import connect_store, host_store

        served, port, error = None, 0, None
        if self.rank == 0:
            try:
                served, port = host_store()
            except GroupError as failure:
                error = failure
        port = self.vote_with("a store for the exchange", error, port)[0]
        if self.rank == 0:
            return served, served
        options = {"timeout_seconds": self.timeout_seconds, "served_by": "rank 0", "check": self.check_alive}
        return connect_store(port, **options), None

    # -- joining and leaving

    def _announce(self, deadline: Deadline) -> None:
        """MPI gave the rank to this process alone; a process that is not of the group cannot join it later."""
        try:
            self._form(deadline)
        except self._mpi.MPI.Exception as error:
            raise GroupError(f"MPI failed while the group {self.name!r} was made: {error}") from error
        if self._place.address is None and spans_hosts([place.on for place in [self._place, *self._places.values()]]):
            # by the name of its host, as MPI itself finds the others
            self._place = self._peers.listener.open_tcp(socket.gethostname())

    def _find_place(self, rank: int, deadline: Deadline) -> Place | None:
        return self._places.get(rank)

    def _refuse_late_joiners(self, deadline: Deadline) -> None:
        """The communicator's ranks are fixed."""

    def _release(self) -> None:
        try:
            if self._comm is None:
                if self._aborted is None:
                    self._publish(Abort("failed", self.rank, "closed before the group was made"))
                return
            deadline = Deadline(1.0, "abort")
            while self._unsent() and not deadline.passed:
                time.sleep(0.001)
            # The communicator is not freed: MPI would give its number to a later one, where messages that nobody
            # has taken, of a collective that failed or to a rank that left, would then arrive.
        except Exception as error:
            logger.warning("rank %d left the group %r uncleanly: %s", self.rank, self.name, error)
        finally:
            self._mpi.keep(send for _, send in self._sends)
            self._sends, self._comm = [], None
