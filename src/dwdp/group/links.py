"""Messages between two ranks over the socket that connects them: a Unix one on one host, else TCP.

Unix sockets keep the borders of messages and carry descriptors. On TCP a message follows its length (4 bytes, big
endian); nothing but the handshake and Goodbye goes there.
"""

from __future__ import annotations

import hmac
import socket

import msgspec

MAX_TCP_MESSAGE_BYTES = 4096
MAX_UNIX_MESSAGE_BYTES = 64 * 1024

# [Note: a host that vanished]
# A host that loses its power sends no end-of-file. Idle connections are probed after 3 s and then every 2 s, and an
# answer that is missing for 9 s ends the connection, which names the rank within about 10 s.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 3, 2, 3
USER_TIMEOUT_SECONDS = 9


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The first message of a connection: who connects to whom. nonce: random, for the acceptor's proof."""

    group: str
    rank: int
    to: int
    nonce: bytes


class Reply(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The acceptor's: its own nonce, and its proof that it has the group's token."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The connector's proof."""

    proof: bytes


class Refused(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The acceptor's proof was wrong: it has another token."""


class Goodbye(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The sender closes its group."""


class Descriptors(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Descriptors of one exchange, in order. numbers: empty when they came along as SCM_RIGHTS, else their
    numbers in the sender, for `pidfd_getfd`; cause: why SCM_RIGHTS failed."""

    exchange: int
    numbers: list[int] = []
    cause: str = ""


class Failed(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """The sender gave up this exchange; its error comes with the vote that ends it."""

    exchange: int


Message = Hello | Reply | Proof | Refused | Goodbye | Descriptors | Failed
encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def decode(payload: bytes) -> Message:
    """Raises ValueError for what is no message."""
    try:
        return _decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no message of a group: {error}") from None


def prove(token: str | None, role: str, hello: Hello, nonce: bytes) -> bytes:
    """The proof that `role` (connector or acceptor) of this very connection has the token; without one, of that."""
    text = msgspec.msgpack.encode(["dwdp group token", role, hello.group, hello.rank, hello.to, hello.nonce, nonce])
    return hmac.digest((token or "").encode(), text, "sha256")


def proves(proof: bytes, token: str | None, role: str, hello: Hello, nonce: bytes) -> bool:
    return hmac.compare_digest(proof, prove(token, role, hello, nonce))


def send_message(sock: socket.socket, message: Message) -> None:
    """Without blocking and whole: BlockingIOError when the buffer is full, OSError as `send` does."""
    data = encode(message)
    if sock.family != socket.AF_UNIX:
        data = len(data).to_bytes(4, "big") + data
    if sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) < len(data):
        raise BlockingIOError  # a peer that takes not even a few hundred bytes is stuck; nothing else follows


def receive_message(sock: socket.socket) -> Message:
    """Without blocking: BlockingIOError while no whole message is there.

    Descriptors that came along are closed by the kernel. Raises EOFError, ValueError for what is no message.
    """
    if sock.family == socket.AF_UNIX:
        payload = sock.recv(MAX_UNIX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        if not payload:
            raise EOFError
        return decode(payload)
    # only looked at until it is whole, so that nothing has to be kept between two calls
    seen = sock.recv(4 + MAX_TCP_MESSAGE_BYTES, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    if not seen:
        raise EOFError
    end = 4 + int.from_bytes(seen[:4], "big")
    if len(seen) >= 4 and end > 4 + MAX_TCP_MESSAGE_BYTES:
        raise ValueError(f"a message of {end - 4} bytes")
    if len(seen) < max(5, end):
        raise BlockingIOError
    return decode(sock.recv(end, socket.MSG_DONTWAIT)[4:])


def keep_alive(sock: socket.socket) -> None:
    """See [Note: a host that vanished]."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, USER_TIMEOUT_SECONDS * 1000),
        (socket.TCP_NODELAY, 1),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
