# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Repeated requests with large bodies: threads send the response and receive the next request of the same head."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from serving_clients import until
from test_large_bodies import assert_echo, connect, read_answer, request, serving, values

pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
pytest.importorskip("httptools", reason="needs httptools, of the extra serve")

from xpuruntime.serving.http import bodies
from xpuruntime.serving.http.connections import Connection

HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def handed(monkeypatch):
    """Return what threads hand back: bytes of the body, and what came in place of the expected head."""
    found: list[tuple[int, bytes | None]] = []
    hand_back = Connection._next_handed_back

    def hand(self, receiver, size, other, unsent):
        found.append((size, other))
        hand_back(self, receiver, size, other, unsent)

    monkeypatch.setattr(Connection, "_next_handed_back", hand)
    return found


@pytest.fixture
def patient(monkeypatch):
    """Have threads wait for what is expected however busy the machine is."""
    monkeypatch.setattr(bodies, "_QUICK", 20.0)


def test_requests_of_one_head_come_whole(own, handed, patient):
    with serving(own, body_threads=2) as server, connect(server) as sock:
        for seed in range(8):
            sock.sendall(request(values(seed)))
            assert_echo(read_answer(sock), values(seed))
    length = len(request(values(0)).partition(b"\r\n\r\n")[2])
    assert handed[:7] == [(length, None)] * 7
    assert all(one.inputs[0].data.ctypes.data % 64 == 0 for one in own.requests[1:])
    assert not any(one.inputs[0].data.flags.writeable for one in own.requests)


def test_other_requests_in_between_are_answered_in_their_order(own, handed):
    """Another length, a small one, another path, and all of them at once."""
    arrays = [values(1), values(2, 70_000), values(3, 3), values(4), values(5), values(6, 90_000)]
    with serving(own, body_threads=2) as server, connect(server) as sock:
        for array in arrays:
            sock.sendall(request(array))
            assert_echo(read_answer(sock), array)
        for _ in range(2):
            sock.sendall(HEALTH)
            assert read_answer(sock)[0] == 200
        sender = threading.Thread(target=sock.sendall, args=(b"".join(map(request, arrays)) + HEALTH,))
        sender.start()
        for array in arrays:
            assert_echo(read_answer(sock), array)
        assert read_answer(sock)[0] == 200
        sender.join()
    assert any(other for _, other in handed)


def test_a_client_whose_requests_differ_is_expected_no_longer(own, handed, patient):
    """One other request in a row of equal ones is forgiven."""
    with serving(own, body_threads=2) as server, connect(server) as sock:
        for number in range(12):
            array = values(number, 60_000 + 10_000 * (number % 2))
            sock.sendall(request(array))
            assert_echo(read_answer(sock), array)
    assert len(handed) == 1
    assert handed[0][1]
    handed.clear()
    with serving(own, body_threads=2) as server, connect(server) as sock:
        for number in range(12):
            if number in (3, 7):
                sock.sendall(HEALTH)
                assert read_answer(sock)[0] == 200
            sock.sendall(request(values(number)))
            assert_echo(read_answer(sock), values(number))
    assert sum(other is None for _, other in handed) == 9


@pytest.mark.parametrize("cut", [1, 40, 200, 70_000])
def test_a_request_that_stalls_is_received_by_the_event_loop(own, handed, cut):
    with serving(own, body_threads=2) as server, connect(server) as sock:
        for seed in range(3):
            made = request(values(seed))
            if seed:
                sock.sendall(made[:cut])
                time.sleep(0.15)  # longer than threads wait
            sock.sendall(made[cut if seed else 0 :])
            assert_echo(read_answer(sock), values(seed))
    head = len(made.partition(b"\r\n\r\n")[0]) + 4
    assert (max(cut - head, 0), made[:cut] if cut < head else None) in handed


def test_a_repeated_body_that_comes_too_slowly_is_refused(own, receivers):
    made = request(values(1))
    with serving(own, body_threads=2, body_seconds=0.3) as server, connect(server) as sock:
        sock.sendall(made)
        assert_echo(read_answer(sock), values(1))
        sock.sendall(made[:1000])
        status, headers, body = read_answer(sock)
        assert (status, headers["connection"]) == (408, "close")
        assert b"too slowly" in body
        assert sock.recv(1) == b""
    assert receivers[0].held._budget.used == 0


@pytest.mark.parametrize("close", [False, True])
def test_what_is_only_expected_holds_nothing_for_long(own, receivers, close):
    with serving(own, body_threads=2) as server, connect(server) as sock:
        sock.sendall(request(values(1)))
        assert_echo(read_answer(sock), values(1))
        budget = receivers[0].held._budget
        if close:
            sock.close()
        assert until(lambda: len(receivers) == 2 and budget.used == 0)
        if not close:
            sock.sendall(request(values(2)))
            assert_echo(read_answer(sock), values(2))


def test_what_is_only_expected_leaves_half_of_the_budget(own, receivers, handed):
    made = request(values(1))
    with serving(own, body_threads=2, max_buffered=2 * len(made) - 2000) as server, connect(server) as sock:
        for seed in range(3):
            sock.sendall(request(values(seed)))
            assert_echo(read_answer(sock), values(seed))
        time.sleep(0.01)
    assert len(receivers) == 3
    assert not handed


def test_a_repeated_request_over_the_budget_is_refused(own):
    """Another one took what was left while this one was waited for."""
    made = request(values(1))
    most = 2 * len(made) + 2000
    with serving(own, body_threads=2, max_buffered=most) as server, contextlib.ExitStack() as open_ones:
        first, second, third = (open_ones.enter_context(connect(server)) for _ in range(3))
        first.sendall(made)
        assert_echo(read_answer(first), values(1))
        second.sendall(request(values(2), "slow"))
        assert until(lambda: own.waiting)
        third.sendall(request(values(3), "slow"))
        first.sendall(made)
        own.release.set()
        found = sorted(read_answer(one)[0] for one in (first, third))
        assert found in ([200, 200], [200, 429])
        assert read_answer(second)[0] == 200


def test_a_server_stops_while_requests_are_expected(own, handed):
    """One that has come by then has its answer, and an idle connection holds nothing up."""
    with serving(own, body_threads=2) as server, connect(server) as idle, connect(server) as busy:
        for sock in (idle, busy):
            sock.sendall(request(values(1)))
            assert_echo(read_answer(sock), values(1))
        busy.sendall(request(values(2), "slow"))
        assert until(lambda: own.waiting)
        began = time.monotonic()
        stopping = threading.Thread(target=server.close)
        stopping.start()
        time.sleep(0.05)
        own.release.set()
        assert_echo(read_answer(busy), values(2))
        assert idle.recv(1) == b"" == busy.recv(1)
        stopping.join()
    assert time.monotonic() - began < 3


def test_clients_beside_each_other_get_their_own_answers(own, handed, patient):
    failures: list[BaseException] = []

    def client(first: int) -> None:
        try:
            with connect(server) as sock:
                for seed in range(first, first + 12):
                    sock.sendall(request(values(seed)))
                    assert_echo(read_answer(sock), values(seed))
        except BaseException as error:
            failures.append(error)

    with serving(own, body_threads=2) as server:
        clients = [threading.Thread(target=client, args=(100 * at,)) for at in range(6)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
    assert not failures
    assert sum(other is None for _, other in handed) > 40
