# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cache files of several processes, allocators over xpuruntime pools, options, and what the log becomes."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
from trt_support import RTX_FACTS, TRT10_FACTS

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.engines.tensorrt.building import CacheFile
from xpuruntime.engines.tensorrt.handle import PoolAllocator, _pointer, make_allocator
from xpuruntime.engines.tensorrt.network import Cancel, failure, interruptible
from xpuruntime.engines.tensorrt.options import (
    RTX,
    TENSORRT,
    checked_options,
)

WRITER = """
import sys
from pathlib import Path
from xpuruntime.engines.tensorrt.building import CacheFile
file = CacheFile(Path(sys.argv[1]))
for step in range(40):
    file.update(lambda before: (before or b"") + sys.argv[2].encode() * 1000 + b"\\n")
"""


def test_two_processes_write_one_cache(tmp_path: Any) -> None:
    path = tmp_path / "deep" / "cache.timing"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, word]) for word in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    lines = path.read_bytes().splitlines()
    assert sorted(set(lines)) == [b"a" * 1000, b"b" * 1000]
    assert len(lines) == 80
    assert sorted(found.name for found in path.parent.iterdir()) == ["cache.timing"]


def test_caches_that_cannot_be_written(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(xrt.EngineError, match="cannot be written"):
        CacheFile(tmp_path / "file" / "cache").update(lambda _: b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(xrt.EngineError, match="cannot be read"):
        CacheFile(tmp_path / "folder").read()


def test_a_change_that_fails_leaves_the_file(tmp_path: Any) -> None:
    file = CacheFile(tmp_path / "cache")
    file.update(lambda _: b"old")

    def broken(content: bytes | None) -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        file.update(broken)
    assert file.read() == b"old"
    assert file.update(lambda content: content) is False
    assert file.update(lambda content: None) is False


@pytest.fixture
def pool() -> _core.MemoryPool:
    """Return a pool of host memory."""
    return _core.MemoryPool("cpu", "caching", limit=1 << 20, name="engine")


def test_an_allocator_over_a_pool(pool: Any) -> None:
    source = PoolAllocator(pool)
    first, second = source.give(1000, 0), source.give(5000, 0)
    assert source.held() == 6000
    assert _pointer(first) % 256 == 0
    assert _pointer(first) != _pointer(second)
    assert source.take(first, 0) is True
    assert source.held() == 5000
    assert source.take(first, 0) is False  # given back already
    assert source.take(None, 0) is True
    assert source.give(0, 0) is None
    assert source.give(1 << 21, 0) is None
    assert "limit" in (source.take_failure() or "")
    assert source.take_failure() is None
    assert source.take(second, 0)
    assert pool.stats().current == 0


def test_the_vendors_allocator_objects(pool: Any) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    source = PoolAllocator(pool)
    allocator = make_allocator(trt, source)
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    runtime.gpu_allocator = allocator
    held = allocator.allocate_async(1000, 256, 0, 0)
    assert source.held() == 1000
    assert allocator.reallocate(held, 256, 2000) is None
    assert allocator.deallocate_async(held, 0) is True
    assert allocator.deallocate(allocator.allocate(10, 256, 0)) is True
    assert source.held() == 0


def test_options_are_checked_by_name_value_and_version() -> None:
    assert checked_options({"builder_optimization_level": 4, "sparse_weights": True}, RTX, RTX_FACTS) == {
        "builder_optimization_level": "4",
        "sparse_weights": "1",
    }
    cases = [
        ({"builder_optimisation_level": 4}, "did you mean 'builder_optimization_level'"),
        ({"builder_optimization_level": 6}, "outside 0..5"),
        ({"tf32": 1}, "is set by execution.tf32"),
        ({"workspace": 1}, "is set by execution.memory.limit"),
        ({"refit": "yes"}, "not one of 'off', 'on', 'identical'"),
        ({"timing_cache": "default"}, "does not have it.*Fix: state engine: tensorrt,"),
        ({"runtime_cache": "cache"}, "for such a file write './cache'"),
        ({"weight_streaming_budget": 100}, "state weight_streaming: 1"),
        ({"max_num_tactics": -2}, "does not have it|outside -1"),
    ]
    for given, message in cases:
        with pytest.raises(xrt.PolicyError, match=message):
            checked_options(given, RTX, RTX_FACTS)
    with pytest.raises(xrt.PolicyError, match=r"there is none\. Fix: state timing_cache"):
        checked_options({"pin_tactics": "record"}, TENSORRT, TRT10_FACTS)
    held = checked_options({"pin_tactics": "record", "timing_cache": "default"}, TENSORRT, TRT10_FACTS)
    assert held["pin_tactics"] == "record"


def test_failures_become_errors_of_ours() -> None:
    known = {"engine": "tensorrt", "device": "cuda:0"}
    assert isinstance(failure("running m", ["Error: out of memory"], **known), xrt.OutOfMemoryError)
    assert isinstance(failure("running m", ["x"], **known, pool="limit of 1 GiB"), xrt.OutOfMemoryError)
    assert isinstance(failure("running m", ["In f (cudaError 700: illegal address)"], **known), xrt.CudaError)
    error = failure("building m", ["no tactics within workspace limit"], **known)
    assert type(error) is xrt.EngineFailed
    assert "execution.memory.limit" in str(error)
    assert (error.engine, error.device) == ("tensorrt", "cuda:0")
    assert "it gave no reason" in str(failure("building m", [], **known))


def test_work_in_the_background() -> None:
    assert interruptible(lambda: threading.current_thread().name, Cancel()) == "xpuruntime-tensorrt"

    def broken() -> None:
        raise xrt.EngineError("no")

    with pytest.raises(xrt.EngineError, match="no"):
        interruptible(broken, Cancel())
