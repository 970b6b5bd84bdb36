# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a communicator does when NCCL fails or stalls: cases for a process that has loaded faulty_nccl.cpp as libnccl.

test_faulty_nccl.py builds that library, and runs them. That results are right is tested with NCCL itself, on GPUs.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from xpuruntime.distributed import CollectivePolicy, Communicator
from xpuruntime.distributed import communicator as communicator_module
from xpuruntime.distributed.nccl import IN_PROGRESS, SUCCESS, Nccl, open_nccl, wait_for
from xpuruntime.errors import EngineError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

x = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def library() -> Nccl:
    ctypes.CDLL(os.environ["FAULTY_NCCL"], mode=ctypes.RTLD_GLOBAL)
    library = open_nccl()
    assert library.path == os.environ["FAULTY_NCCL"]
    return library


@pytest.fixture
def make(library: Nccl, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Communicator]:
    monkeypatch.delenv("FAULT", raising=False)

    def connect(timeout: float = 20.0, **fields: Any) -> Communicator:
        policy = CollectivePolicy(**fields)
        config = policy.config(library, {})
        handle = library.connect(library.make_id(), 0, 1, config)
        assert not isinstance(handle, int), f"the arguments did not arrive as they were: {handle}"
        communicator = Communicator(
            library, handle, config, rank=0, world_size=1, device="cpu", policy=policy, timeout=timeout
        )
        communicator._settle(SUCCESS, "init")
        return communicator

    return connect


def count(library: Nccl, event: str) -> int:
    return int(getattr(ctypes.CDLL(library.path), f"faulty_{event}")())


def test_the_library_answers(library: Nccl):
    assert (library.version, open_nccl()) == ((2, 28, 9), library)
    assert library.explain(5) == "invalid usage; last message: what was said last"
    assert len(library.make_id()) == 128


@pytest.mark.parametrize("blocking", [False, True])
def test_calls_arrive_with_their_arguments(make: Callable[..., Communicator], blocking: bool):
    with make(blocking=blocking) as comm:
        for result in (
            comm.all_reduce(x),
            comm.reduce(x),
            comm.broadcast(x),
            comm.all_gather(x),
            comm.reduce_scatter(x),
        ):
            assert result is not x
            np.testing.assert_array_equal(result, x)
        place = x.copy()
        assert comm.all_reduce(place, out=place) is place
        comm.synchronize()
        comm.check()
    assert comm.closed


@pytest.mark.parametrize(
    "name", ["bool", "float16", "float64", "int8", "int64", "uint64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_every_dtype_arrives_with_its_size(make: Callable[..., Communicator], name: str):
    pytest.importorskip("ml_dtypes")
    array = np.arange(12).reshape(4, 3).astype(name)
    with make() as comm:
        np.testing.assert_array_equal(comm.all_reduce(array, "max"), array)
        np.testing.assert_array_equal(comm.reduce_scatter(array, "min"), array)
        np.testing.assert_array_equal(comm.broadcast(array), array)
        np.testing.assert_array_equal(comm.all_gather(array.astype(np.int16)), array.astype(np.int16))


def test_a_group_is_one_call_of_nccl(make: Callable[..., Communicator], library: Nccl):
    with make() as comm:
        calls, groups = count(library, "calls"), count(library, "groups")
        with comm.group():
            comm.send(x, 0)
            received = comm.recv(np.empty_like(x), 0)
            with comm.group():
                comm.all_reduce(x)
            assert count(library, "calls") == calls, "handed over before the group ended"
        assert (count(library, "calls"), count(library, "groups")) == (calls + 3, groups + 1)
        assert received.shape == x.shape
        with pytest.raises(InputError), comm.group():
            comm.all_reduce(x[:, ::2])
        assert count(library, "groups") == groups + 1


def test_what_nccl_refuses_is_told_in_its_words(
    make: Callable[..., Communicator], library: Nccl, monkeypatch: pytest.MonkeyPatch
):
    comm, before = make(), count(library, "aborted")
    monkeypatch.setenv("FAULT", "refuse")
    with pytest.raises(
        EngineError,
        match=r"^all_reduce on rank 0 of 1 on cpu: invalid usage; last message: what was said last\. "
        r"The communicator was aborted\. Fix: make the same call with the same policy",
    ) as caught:
        comm.all_reduce(x)
    assert (caught.value.engine, caught.value.status, caught.value.device) == ("nccl", 5, "cpu")
    assert count(library, "aborted") == before + 1
    with pytest.raises(EngineError, match="broadcast on rank 0 of 1: this communicator failed before: all_reduce on"):
        comm.broadcast(x)
    comm.close()
    assert count(library, "aborted") == before + 1, "aborted twice"


def test_an_error_of_a_group_names_its_calls(make: Callable[..., Communicator], monkeypatch: pytest.MonkeyPatch):
    comm = make()
    monkeypatch.setenv("FAULT", "late_error")

    def both() -> None:
        with comm.group():
            comm.send(x, 0)
            comm.recv(x.copy(), 0)

    with pytest.raises(EngineError, match=r"^send \+ recv on rank 0 of 1 .*remote process exited"):
        both()
    assert comm.closed


def test_a_call_that_is_not_launched_in_time(make: Callable[..., Communicator], monkeypatch: pytest.MonkeyPatch):
    comm = make(timeout=0.2)
    monkeypatch.setenv("FAULT", "stall")
    with pytest.raises(
        EngineError, match=r"could not launch it within 0\.2 s: a peer has not made the same call"
    ) as caught:
        comm.all_gather(x)
    assert caught.value.status == 7


def test_what_nccl_notices_later(make: Callable[..., Communicator], monkeypatch: pytest.MonkeyPatch):
    comm = make(blocking=True)
    monkeypatch.setenv("FAULT", "late_error")
    comm.all_reduce(x)
    wait_for(lambda: comm._state() != IN_PROGRESS, 20)
    with pytest.raises(
        EngineError, match=r"^check on rank 0 .*remote process exited.* make a new communicator with the ranks"
    ):
        comm.check()


def test_abort_frees_a_call_that_waits_on_another_thread(
    make: Callable[..., Communicator], monkeypatch: pytest.MonkeyPatch
):
    comm = make(timeout=60)
    monkeypatch.setenv("FAULT", "stall")
    timer = threading.Timer(0.1, comm.abort)
    timer.start()
    with pytest.raises(EngineError, match=r"it was aborted by abort\(\) while a call waited"):
        comm.all_reduce(x)
    timer.join()


def test_closing_that_does_not_end(make: Callable[..., Communicator], library: Nccl, monkeypatch: pytest.MonkeyPatch):
    comm, before = make(), count(library, "aborted")
    monkeypatch.setenv("FAULT", "finalize_stalls")
    with pytest.raises(EngineError, match=r"^close on rank 0 of 1 on cpu: its work did not end within 0\.2 s\. The"):
        comm.close(timeout=0.2)
    assert count(library, "aborted") == before + 1
    assert comm.closed


def test_an_abort_that_does_not_end_holds_up_nobody(make: Callable[..., Communicator], monkeypatch: pytest.MonkeyPatch):
    comm = make()
    monkeypatch.setattr(communicator_module, "_ABORT_SECONDS", 0.1)
    monkeypatch.setenv("FAULT", "abort_stalls")
    comm.abort()
    assert comm.closed


def test_closing_frees_it_and_an_exception_aborts_it(make: Callable[..., Communicator], library: Nccl):
    destroyed, aborted = count(library, "destroyed"), count(library, "aborted")
    with make():
        pass
    assert (count(library, "destroyed"), count(library, "aborted")) == (destroyed + 1, aborted)

    def fail() -> None:
        with make():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (count(library, "destroyed"), count(library, "aborted")) == (destroyed + 1, aborted + 1)
