# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranks meet over TCP: between processes, late, early, twice, and with every mistake that can be made."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from xpuruntime.distributed.rendezvous.member import Member
from xpuruntime.distributed.rendezvous.tcp import TcpRendezvous
from xpuruntime.errors import EngineError

ID = bytes(range(128))

WORKER = """
import sys
from xpuruntime.distributed.rendezvous.member import Member
from xpuruntime.distributed.rendezvous.tcp import TcpRendezvous
rank, world, port = map(int, sys.argv[1:])
member = Member(rank=rank, world_size=world)
print(TcpRendezvous("127.0.0.1", port).exchange(member, lambda: bytes(range(128)), 60).hex())
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(
    members: list[Member], port: int, timeout: float = 20.0, others: float | None = None, make_id=lambda: ID
) -> list[bytes | EngineError]:
    """Let each member run in a thread of its own; return what it got, or its error."""

    def run(member: Member) -> bytes | EngineError:
        try:
            seconds = timeout if member.rank == 0 or others is None else others
            return TcpRendezvous("127.0.0.1", port).exchange(member, make_id, seconds)
        except EngineError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


def test_processes_meet():
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), "3", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (2, 0, 1)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=90) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0, 0], said
    assert [out.strip() for out, _ in said] == [ID.hex()] * 3


def test_the_others_may_come_first_and_the_same_port_serves_again():
    port = free_port()
    for _ in range(3):
        result: list[bytes] = []
        early = threading.Thread(target=lambda found=result: found.extend(meet([Member(rank=1, world_size=2)], port)))
        early.start()
        time.sleep(0.05)
        assert TcpRendezvous("127.0.0.1", port).exchange(Member(rank=0, world_size=2), lambda: ID, 20) == ID
        early.join(20)
        assert result == [ID]


def test_many_ranks_meet():
    found = meet([Member(rank=rank, world_size=12) for rank in range(12)], free_port())
    assert found == [ID] * 12


def test_rank_0_names_who_did_not_come_and_tells_those_who_did():
    port = free_port()
    found = meet([Member(rank=0, world_size=4), Member(rank=2, world_size=4)], port, timeout=2, others=20)
    assert all(isinstance(error, EngineError) for error in found)
    assert "within 2 s: rank 1, 3 did not come to 127.0.0.1:" in str(found[0])
    assert "rank 2 of 4" in str(found[1])
    assert "Fix: start every rank" in str(found[0])


def test_without_rank_0_the_others_say_where_they_looked():
    port = free_port()
    (error,) = meet([Member(rank=1, world_size=2)], port, timeout=0.3)
    assert isinstance(error, EngineError)
    assert f"rank 0 at 127.0.0.1:{port}" in str(error)
    assert "refused" in str(error).lower()
    assert error.engine == "nccl"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Member(rank=1, world_size=3), r"rank 1 \(process \d+ on .+\) says world_size 3, and rank 0 .* says 2"),
        (Member(rank=1, world_size=2, library="2.27.7"), r"has NCCL 2\.27\.7, and rank 0"),
        (Member(rank=1, world_size=2, library="2.28.9", policy="tree"), "asks for tree, and rank 0 .* for ring"),
        (Member(rank=1, world_size=2, library="2.28.9", policy="ring", gpu="here/0"), "use the same GPU"),
    ],
)
def test_both_sides_hear_why_they_do_not_fit(second: Member, words: str):
    first = Member(rank=0, world_size=2, library="2.28.9", policy="ring", gpu="here/0")
    found = meet([first, second], free_port(), timeout=20)
    for rank, error in enumerate(found):
        assert isinstance(error, EngineError)
        assert str(error).startswith(f"rank {rank} of ")
        with pytest.raises(EngineError, match=words):
            raise error
        assert "Fix:" in str(error)


def test_two_processes_of_one_rank():
    members = [Member(rank=0, world_size=3), Member(rank=1, world_size=3, pid=11), Member(rank=1, world_size=3, pid=12)]
    found = meet(members, free_port())
    for error in found:
        assert isinstance(error, EngineError)
        assert "two processes say they are rank 1" in str(error)
        assert "11 on " in str(error)
        assert "12 on " in str(error)


def test_a_rank_that_died_while_it_waited_may_come_again():
    port = free_port()
    result: list[bytes] = []
    rank_0 = threading.Thread(
        target=lambda: result.append(
            TcpRendezvous("127.0.0.1", port).exchange(Member(rank=0, world_size=3), lambda: ID, 20)
        )
    )
    rank_0.start()
    (error,) = meet([Member(rank=1, world_size=3)], port, timeout=2)  # it joins, waits, and gives up
    assert "still waits for other ranks" in str(error)
    found = meet([Member(rank=1, world_size=3), Member(rank=2, world_size=3)], port)
    rank_0.join(20)
    assert [*found, *result] == [ID] * 3


def test_strangers_do_no_harm():
    port = free_port()
    result: list[bytes] = []
    rank_0 = threading.Thread(
        target=lambda: result.append(
            TcpRendezvous("127.0.0.1", port).exchange(Member(rank=0, world_size=2), lambda: ID, 20)
        )
    )
    rank_0.start()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"XRT1\xff\xff\xff\xff", b"XRT1\x00\x00\x00\x02[]", b"XR", b""):
        deadline = time.monotonic() + 120
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                    stranger.sendall(words)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "rank 0 never listened"
                time.sleep(0.02)
    assert meet([Member(rank=1, world_size=2)], port) == [ID]
    rank_0.join(20)
    assert result == [ID]


def test_what_listens_there_may_be_something_else():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        (error,) = meet([Member(rank=1, world_size=2)], port, timeout=0.5)
    assert isinstance(error, EngineError)
    assert "rank 0 at 127.0.0.1" in str(error)


def test_a_port_in_use_and_an_address_of_another_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EngineError, match=r"cannot listen on 127\.0\.0\.1.*free port"):
            TcpRendezvous("127.0.0.1", port).exchange(Member(rank=0, world_size=2), lambda: ID, 5)
    with pytest.raises(EngineError, match=r"cannot listen on 192\.0\.2\.1.*Fix:"):
        TcpRendezvous("192.0.2.1", 4321).exchange(Member(rank=0, world_size=2), lambda: ID, 5)


def test_rank_0_that_cannot_make_the_id_tells_the_others():
    def fail() -> bytes:
        raise EngineError("no network interface")

    found = meet([Member(rank=0, world_size=2), Member(rank=1, world_size=2)], free_port(), make_id=fail)
    assert "no network interface" in str(found[0])
    assert "rank 0 gave up: no network interface" in str(found[1])


def sockets_listening_on(port: int) -> list[str]:
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return [line.split()[1] for line in lines if f":{port:04X} 00000000:0000 0A" in line]


def test_it_listens_on_the_given_address_only():
    port = free_port()
    thread = threading.Thread(target=lambda: meet([Member(rank=0, world_size=2)], port, timeout=3))
    thread.start()
    deadline = time.monotonic() + 120
    while not (listening := sockets_listening_on(port)):
        assert time.monotonic() < deadline, "it never listened"
        time.sleep(0.02)
    assert listening == [f"0100007F:{port:04X}"]
    meet([Member(rank=1, world_size=2)], port)
    thread.join(20)
