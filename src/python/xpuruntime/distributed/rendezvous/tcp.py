# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rendezvous over TCP: rank 0 listens, the others connect."""

from __future__ import annotations

import errno
import selectors
import socket
import string
import struct
import time
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.distributed.rendezvous.member import Member, late, misfit, refused
from xpuruntime.files.reading import decode_json

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TcpRendezvous"]

_HEADER = struct.Struct("!4sI")
_MAGIC = b"XRT1"
_LONGEST = 1 << 16
_CONNECT = 5.0


class TcpRendezvous:
    """Ranks meet at a port of rank 0's machine.

    Rank 0 listens on that one address until all have joined. A rank that comes early tries again until the time is up.
    Whoever can reach the port can join: use a network that you trust, or ``127.0.0.1`` on one machine.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._where = f"{host}:{port}"

    def exchange(self, member: Member, make_id: Callable[[], bytes], timeout: float) -> bytes:
        """As `Rendezvous.exchange`."""
        deadline = time.monotonic() + timeout
        if member.rank != 0:
            return self._join(member, timeout, deadline)
        with self._listen(member) as listener:
            return _Gathering(listener, member, self._where).run(make_id, timeout, deadline)

    def _listen(self, member: Member) -> socket.socket:
        try:
            (family, _, _, _, address), *_ = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            return socket.create_server(address[:2], family=family, backlog=min(1024, member.world_size + 8))
        except OSError as error:
            fixes = {
                errno.EADDRINUSE: "another process listens there, a store of torch.distributed perhaps; pass "
                "init_method='tcp://host:port' with a free port",
                errno.EADDRNOTAVAIL: "it is no address of this machine; name the machine that rank 0 runs on",
            }
            fix = fixes.get(error.errno or 0, "pass an address of this machine and a free port")
            reason = f"rank 0 cannot listen on {self._where}: {error.strerror or error}"
            raise refused(member, f"{reason}. Fix: {fix}") from None

    def _join(self, member: Member, timeout: float, deadline: float) -> bytes:
        reason, pause = "", 0.02
        message = _pack(member.to_plain())
        while (left := deadline - time.monotonic()) > 0:
            try:
                with socket.create_connection((self._host, self._port), timeout=min(left, _CONNECT)) as connection:
                    connection.sendall(message)
                    reason = "it took the connection and still waits for other ranks"
                    reply = _read(connection, deadline)
            except TimeoutError:
                reason = reason or "it does not answer"
            except (OSError, ValueError) as error:
                reason = str(getattr(error, "strerror", None) or error)
            else:
                if reply is not None:
                    if "error" in reply:
                        raise refused(member, str(reply["error"]))
                    return bytes.fromhex(reply["id"])
                # What listens there ended without an answer: rank 0 of an earlier communicator, or one that failed.
                reason = "it closed the connection without an answer"
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(0.25, pause * 1.5)
        raise late(
            member,
            timeout,
            f"rank 0 at {self._where}: {reason or 'there was no time to ask'}",
            "start every rank, with one address and port of the machine of rank 0; raise timeout= if they start slowly",
        )


class _Peer:
    """One connection to rank 0."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.data = b""
        self.member: Member | None = None
        self._answered = False

    def read(self) -> bool:
        """Take what has come. Returns false when the connection is of no use any more."""
        try:
            chunk = self.connection.recv(_LONGEST)
        except OSError:
            return False
        if not chunk or self.member is not None:
            return False
        self.data += chunk
        if len(self.data) < _HEADER.size:
            return True
        try:
            size = _body_size(self.data[: _HEADER.size])
            if len(self.data) >= _HEADER.size + size:
                body = self.data[_HEADER.size : _HEADER.size + size]
                self.member = decode_json(body, Member)
        except (ValueError, msgspec.MsgspecError):
            return False
        return True

    def answer(self, message: bytes) -> None:
        """Send the one answer that a peer gets."""
        if self._answered:
            return
        self._answered = True
        try:
            self.connection.settimeout(_CONNECT)
            self.connection.sendall(message)
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is gone, and NCCL will say so


class _Gathering:
    """Rank 0 until all others have joined."""

    def __init__(self, listener: socket.socket, member: Member, where: str) -> None:
        self._listener, self._member, self._where = listener, member, where
        self._peers: list[_Peer] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self, make_id: Callable[[], bytes], timeout: float, deadline: float) -> bytes:
        """Return the id, once everybody has it."""
        try:
            while len(self._joined()) < self._member.world_size - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._missing(timeout)
                for key, _ in self._selector.select(left):
                    self._accept() if key.data is None else self._read(key.data)
            made = make_id()
            self._answer({"id": made.hex()})
            self._wait_for_ends(deadline)
            return made
        except BaseException as error:
            self._answer({"error": f"rank 0 gave up: {error}"})  # nothing to those that have an answer
            raise
        finally:
            for peer in self._peers:
                peer.connection.close()
            self._selector.close()

    def _joined(self) -> list[Member]:
        return [peer.member for peer in self._peers if peer.member is not None]

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        known = self._joined()
        was_new = peer.member is None
        if not peer.read():
            # It ended, or never spoke our language. Its rank may come again.
            self._selector.unregister(peer.connection)
            peer.connection.close()
            self._peers.remove(peer)
        elif was_new and peer.member is not None:
            reason = misfit([self._member, *known], peer.member)
            if reason is not None:
                self._answer({"error": reason})
                raise refused(self._member, reason)

    def _answer(self, words: dict[str, Any]) -> None:
        message = _pack(words)
        for peer in self._peers:
            if peer.member is not None:
                peer.answer(message)

    def _wait_for_ends(self, deadline: float) -> None:
        """Wait until the others have read their answer, so that closing cannot take it from them."""
        for peer in self._peers:
            try:
                peer.connection.settimeout(max(0.01, min(_CONNECT, deadline - time.monotonic())))
                while peer.connection.recv(_LONGEST):
                    pass
            except OSError:
                continue

    def _missing(self, timeout: float) -> Exception:
        here = {member.rank for member in self._joined()}
        missing = [rank for rank in range(1, self._member.world_size) if rank not in here]
        named = ", ".join(map(str, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        return late(
            self._member,
            timeout,
            f"rank {named} did not come to {self._where}",
            "start every rank, and see whether one failed before it came; raise timeout= if they start slowly",
        )


def _pack(words: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(words)
    return _HEADER.pack(_MAGIC, len(body)) + body


def _body_size(header: bytes) -> int:
    magic, size = _HEADER.unpack(header)
    if magic != _MAGIC or size > _LONGEST:
        raise ValueError("what listens there is not rank 0 of a communicator")
    return int(size)


def _is_hex(text: Any) -> bool:
    return isinstance(text, str) and len(text) % 2 == 0 and all(c in string.hexdigits for c in text)


def _read(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """Read one message; ``None`` when the other side ended before it was whole."""
    data = b""
    wanted = _HEADER.size
    while len(data) < wanted:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        chunk = connection.recv(wanted - len(data))
        if not chunk:
            return None
        data += chunk
        if wanted == _HEADER.size and len(data) == wanted:
            wanted += _body_size(data)
    try:
        reply = decode_json(data[_HEADER.size :])
    except msgspec.MsgspecError:
        reply = None
    if not isinstance(reply, dict) or not (_is_hex(reply.get("id")) or "error" in reply):
        raise ValueError("what listens there is not rank 0 of a communicator")
    return reply
