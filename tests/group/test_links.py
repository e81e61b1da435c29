"""Messages over both kinds of sockets, whole or not at all; proofs of the token."""

from __future__ import annotations

import socket
import time

import pytest

from dwdp.group.links import (
    Goodbye,
    Hello,
    Reply,
    encode,
    keep_alive,
    prove,
    proves,
    receive_message,
    send_message,
)

HELLO = Hello("dwdp", 2, 0, b"n" * 16)


def pairs():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        near = socket.create_connection(listening.getsockname())
        keep_alive(near)  # and no delay
        far, _ = listening.accept()
    return [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), (near, far)]


def arrived(sock):
    """The next message, which loopback may take a moment to deliver."""
    for _ in range(200):
        try:
            return receive_message(sock)
        except BlockingIOError:
            time.sleep(0.005)
    raise AssertionError("nothing came")


@pytest.mark.parametrize("kind", [0, 1], ids=["unix", "tcp"])
def test_messages_arrive_whole_and_in_order_and_the_end_is_told(kind):
    a, b = pairs()[kind]
    with a, b:
        with pytest.raises(BlockingIOError):
            receive_message(b)
        sent = [HELLO, Reply(b"m", b"p" * 32), Goodbye()]
        for message in sent:
            send_message(a, message)
        assert [arrived(b) for _ in sent] == sent
        a.close()
        with pytest.raises(EOFError):
            arrived(b)


def test_a_message_in_pieces_is_taken_once_it_is_whole_and_rubbish_is_refused():
    a, b = pairs()[1]
    with a, b:
        data = encode(HELLO)
        data = len(data).to_bytes(4, "big") + data
        for byte in data[:-1]:
            a.send(bytes([byte]))
            with pytest.raises(BlockingIOError):
                receive_message(b)
        a.send(data[-1:])
        assert arrived(b) == HELLO
        a.send((5000).to_bytes(4, "big"))
        with pytest.raises(ValueError, match="5000 bytes"):
            arrived(b)
    for a, b in pairs():
        with a, b:
            a.send((3).to_bytes(4, "big") + b"\xff\xff\xff")
            with pytest.raises(ValueError, match="no message"):
                arrived(b)


def test_a_proof_holds_for_its_token_role_ranks_and_nonces_alone():
    proof = prove("secret", "acceptor", HELLO, b"nonce")
    assert len(proof) == 32 and proves(proof, "secret", "acceptor", HELLO, b"nonce")
    for other in (
        ("other", "acceptor", HELLO, b"nonce"),
        (None, "acceptor", HELLO, b"nonce"),
        ("secret", "connector", HELLO, b"nonce"),
        ("secret", "acceptor", Hello("dwdp", 1, 0, b"n" * 16), b"nonce"),
        ("secret", "acceptor", Hello("dwdp", 2, 1, b"n" * 16), b"nonce"),
        ("secret", "acceptor", Hello("other", 2, 0, b"n" * 16), b"nonce"),
        ("secret", "acceptor", Hello("dwdp", 2, 0, b"x" * 16), b"nonce"),
        ("secret", "acceptor", HELLO, b"other"),
    ):
        assert not proves(proof, *other)
    assert proves(prove(None, "connector", HELLO, b"n"), "", "connector", HELLO, b"n")
