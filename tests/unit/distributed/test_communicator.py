# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A communicator without a GPU: what is refused, in which words, and how calls are collected and ended."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

import xpuruntime as xrt
from xpuruntime import distributed
from xpuruntime.distributed import CollectivePolicy, Communicator
from xpuruntime.distributed.nccl import run_within, wait_for
from xpuruntime.distributed.policy import Call, in_group, launch
from xpuruntime.errors import CudaError, EngineError, InputError
from xpuruntime.runtime.libraries.loading import find_library

no_gpu = pytest.mark.skipif(xrt.get_device_count("cuda") > 0, reason="this machine has a GPU")
needs_nccl = pytest.mark.skipif(
    find_spec("nccl") is None or not find_library("nccl", 2),
    reason="needs NCCL: pip install nccl4py nvidia-nccl-cu13",
)


def without_handle(**changes: Any) -> Communicator:
    """Return a communicator that NCCL knows nothing of, for what is decided before NCCL is asked."""
    facts = SimpleNamespace(version=(2, 28, 9), path="libnccl.so.2")
    fields = {"rank": 1, "world_size": 2, "device": "cuda:0", "policy": CollectivePolicy(), "timeout": 5.0, **changes}
    return Communicator(facts, None, None, **fields)  # type: ignore[arg-type]


@no_gpu
def test_without_a_gpu():
    with pytest.raises(CudaError, match=r"'cuda:0' does not exist: .*(install the driver|has no CUDA core)"):
        distributed.Communicator.init(0, 1)
    with pytest.raises(CudaError, match="'cuda:3' does not exist"):
        distributed.Communicator.init(0, 2, init_method="tcp://127.0.0.1:29400", device=3)


@no_gpu
def test_torchrun_says_which_gpu(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "7"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CudaError, match="'cuda:7' does not exist"):
        distributed.init_from_env()


def test_without_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"no RANK. Fix: start the program with torchrun"):
        distributed.init_from_env()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="no WORLD_SIZE"):
        distributed.init_from_env()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 2), "rank is 2, and world_size 2. Fix: give a rank from 0 to 1"),
        ((-1, 2), "rank is -1"),
        ((0, 0), "world_size is 0. Fix: give a whole number from 1"),
        ((True, 2), "rank is True"),
        (("0", 2), "rank is '0'"),
    ],
)
def test_ranks_that_make_no_sense(arguments: tuple[Any, Any], words: str):
    with pytest.raises(InputError, match=words):
        distributed.Communicator.init(*arguments)


def test_other_arguments_that_make_no_sense():
    for timeout in (0, -1, float("inf"), float("nan"), "60", None, True):
        with pytest.raises(InputError, match="timeout is"):
            distributed.Communicator.init(0, 1, timeout=timeout)
    with pytest.raises(InputError, match=r"config is {}. Fix: give a CollectivePolicy"):
        distributed.Communicator.init(0, 1, config={})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"device is cpu, and NCCL works on GPUs only. Fix: pass device='cuda:0'"):
        distributed.Communicator.init(0, 1, device="cpu")


def test_without_nccl():
    """In a process that finds no nccl4py, and in another that has it and finds no library."""
    code = """
import sys
from xpuruntime.distributed.nccl import open_nccl
if sys.argv[1] == "package":
    sys.modules["nccl.bindings"] = None
else:
    import nccl.bindings.nccl as bindings
    from cuda.pathfinder import DynamicLibNotFoundError
    def fail():
        raise DynamicLibNotFoundError('Failure finding "libnccl.so.2"')
    bindings.get_version = fail
try:
    open_nccl()
except Exception as error:
    print(type(error).__name__, error)
"""
    cases = {"package": "import of nccl.bindings halted"}
    if find_spec("nccl") is not None:
        cases["library"] = 'Failure finding "libnccl.so.2"'
    for case, words in cases.items():
        done = subprocess.run(
            [sys.executable, "-c", code, case], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.startswith("EngineUnavailable NCCL cannot be used: "), done.stdout
        assert words in done.stdout
        assert '. Fix: `pip install "nccl4py' in done.stdout
        assert "(the extra xpuruntime[nccl])" in done.stdout


@needs_nccl
def test_nccl_answers():
    """In a process of its own: an opened library stays."""
    code = """
from xpuruntime.distributed.nccl import open_nccl
library = open_nccl()
assert library.version >= (2, 18, 0)
assert library is open_nccl()
assert library.explain(4).startswith("invalid argument")
assert len(library.make_id()) == 128
assert library.make_id() != library.make_id()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_it_opens_no_library():
    code = "import xpuruntime.distributed, sys; print(open('/proc/self/maps').read(), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "nccl.so" not in done.stdout
    assert "torch " not in done.stdout


def test_a_forked_process_is_told():
    communicator = without_handle()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork, where other tests left threads
        child = os.fork()
    if child == 0:
        try:
            communicator.check()
        except EngineError as error:
            os.write(writer, str(error).encode())
        communicator.close()
        communicator.abort()
        communicator.__del__()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    assert os.waitpid(child, 0)[1] == 0
    assert f"made by process {os.getpid()}, and process {child} was forked from that" in text
    assert "Fix: start processes with 'spawn'" in text


def test_after_it_was_closed_every_call_says_so():
    communicator = without_handle()
    assert not communicator.closed
    communicator.abort()
    assert communicator.closed
    assert "closed" in repr(communicator)
    for call in (communicator.check, communicator.synchronize, lambda: communicator._require_usable("all_reduce")):
        with pytest.raises(EngineError, match=r"on rank 1 of 2: this communicator is closed. Fix: make a new one"):
            call()
    communicator.close()
    communicator.abort()


def test_it_cannot_be_pickled():
    with pytest.raises(TypeError, match="cannot be pickled: it is of one process"):
        pickle.dumps(without_handle())


def test_dropping_it_warns_and_never_raises():
    class Library:
        version, path = (2, 28, 9), ""
        aborted = threading.Event()

        def status(self, function: str, handle: int) -> int:
            assert function == "comm_abort"
            self.aborted.set()
            raise OSError("it failed")

    communicator = without_handle()
    communicator._library, communicator._handle = Library(), 1  # type: ignore[assignment]
    with pytest.warns(ResourceWarning, match="was dropped without close"):
        communicator.__del__()
    assert Library.aborted.wait(10)
    del communicator
    gc.collect()


def prepared(communicator: Communicator, op: str) -> Call:
    """Return a call that nothing can launch: its communicator has no handle, and its library no functions."""
    return Call(communicator, op, (), SimpleNamespace(handle=0), (), (), False)  # type: ignore[arg-type]


def test_an_exception_in_a_group_drops_its_calls():
    communicator = without_handle()

    def work() -> None:
        with communicator.group():
            launch(prepared(communicator, "send"))
            assert in_group()
            communicator.recv(None, 9)

    with pytest.raises(InputError, match="peer is 9"):
        work()
    assert not in_group()


def test_what_waits_is_refused_in_a_group():
    communicator = without_handle()
    with distributed.group(), distributed.group():
        for call in (communicator.barrier, communicator.synchronize, communicator.close):
            with pytest.raises(InputError, match="group"):
                call()
        assert in_group()
    assert not in_group()


def test_a_group_is_of_its_thread():
    seen: list[bool] = []
    with distributed.group():
        thread = threading.Thread(target=lambda: seen.append(in_group()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_group_of_two_kinds_is_refused():

    def work() -> None:
        with distributed.group():
            launch(prepared(without_handle(), "send"))
            launch(prepared(without_handle(policy=CollectivePolicy(blocking=True)), "recv"))

    with pytest.raises(InputError, match="blocking=True and blocking=False"):
        work()


def test_waiting_ends_when_it_is_done_or_the_time_is_up():
    turns = iter([False, False, True])
    assert wait_for(lambda: next(turns), 10)
    assert not wait_for(lambda: False, 0.05)
    assert wait_for(lambda: True, -1)


def test_work_that_does_not_end_is_left_behind():
    release = threading.Event()
    assert run_within(lambda: release.wait(30), 0.05, "test") == (False, None)
    release.set()
    assert run_within(lambda: 3, 10, "test") == (True, 3)
    with pytest.raises(KeyError):
        run_within(lambda: {}[1], 10, "test")
