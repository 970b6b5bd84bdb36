# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a communicator does when NCCL fails or stalls, with a library that does so when told.

That results are right is tested with NCCL itself, on GPUs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from xpuruntime.distributed import communicator as communicator_module
from xpuruntime.distributed.communicator import Communicator
from xpuruntime.distributed.nccl import NcclLibrary, UniqueId
from xpuruntime.distributed.policy import CollectivePolicy
from xpuruntime.errors import EngineError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

x = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NcclLibrary:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    built = tmp_path_factory.mktemp("faulty") / "libnccl.so.2"
    source = Path(__file__).with_name("faulty_nccl.cpp")
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(built), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return NcclLibrary(str(built))


@pytest.fixture
def make(library: NcclLibrary, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Communicator]:
    monkeypatch.delenv("FAULT", raising=False)

    def connect(timeout: float = 20.0, **fields: object) -> Communicator:
        policy = CollectivePolicy(**fields)
        handle, config = ctypes.c_void_p(), policy.config(library, {})
        unique = UniqueId.from_buffer_copy(library.make_id())
        result = library.ncclCommInitRankConfig(ctypes.byref(handle), 1, unique, 0, ctypes.byref(config))
        assert handle.value, f"the arguments did not arrive as they were: {result}"
        made = Communicator(
            library, handle.value, config, rank=0, world_size=1, device="cpu", policy=policy, timeout=timeout
        )
        made._settle(result, "init")
        return made

    return connect


def count(library: NcclLibrary, what: str) -> int:
    return int(getattr(ctypes.CDLL(library.path), f"faulty_{what}")())


@pytest.mark.parametrize("blocking", [False, True])
def test_calls_arrive_with_their_arguments(make: Callable[..., Communicator], blocking: bool):
    with make(blocking=blocking) as comm:
        for found in (
            comm.all_reduce(x),
            comm.reduce(x),
            comm.broadcast(x),
            comm.all_gather(x),
            comm.reduce_scatter(x),
        ):
            assert found is not x
            np.testing.assert_array_equal(found, x)
        place = x.copy()
        assert comm.all_reduce(place, out=place) is place
        comm.synchronize()
        comm.check()
    assert comm.closed


def test_a_group_is_one_call_of_nccl(make: Callable[..., Communicator], library: NcclLibrary):
    with make() as comm:
        calls, groups = count(library, "calls"), count(library, "groups")
        with comm.group():
            comm.send(x, 0)
            got = comm.recv(np.empty_like(x), 0)
            with comm.group():
                comm.all_reduce(x)
            assert count(library, "calls") == calls, "handed over before the group ended"
        assert (count(library, "calls"), count(library, "groups")) == (calls + 3, groups + 1)
        assert got.shape == x.shape
        with pytest.raises(InputError), comm.group():
            comm.all_reduce(x[:, ::2])
        assert count(library, "groups") == groups + 1


def test_what_nccl_refuses_is_told_in_its_words(
    make: Callable[..., Communicator], library: NcclLibrary, monkeypatch: pytest.MonkeyPatch
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
    time.sleep(0.02)
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


def test_closing_that_does_not_end(
    make: Callable[..., Communicator], library: NcclLibrary, monkeypatch: pytest.MonkeyPatch
):
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


def test_closing_frees_it_and_an_exception_aborts_it(make: Callable[..., Communicator], library: NcclLibrary):
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
