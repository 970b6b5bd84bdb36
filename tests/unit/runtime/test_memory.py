# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pools, buffers, reports and engine allocators, on the CPU."""

import ctypes
import gc
import sys
import threading

import numpy as np
import psutil
import pytest

from xpuruntime._core import EngineAllocator, MemoryManager, copy_to_contiguous
from xpuruntime.errors import CudaError, InputError, OutOfMemoryError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.runtime.device import Device
from xpuruntime.runtime.memory import Buffer, MemoryPool, memory_report

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["caching", "direct"])
def test_a_buffer_is_real_memory(kind):
    pool = MemoryPool("cpu", kind)
    buffer = pool.allocate(1000)
    assert isinstance(buffer, Buffer)
    assert (buffer.nbytes, buffer.device, buffer.stream, buffer.ptr % 256) == (1000, "cpu", 0, 0)
    view = np.frombuffer(buffer, dtype=np.uint8)
    view[:] = 7
    assert view.ctypes.data == buffer.ptr
    del buffer  # the array keeps it
    assert view.sum() == 7000
    assert pool.stats().allocations == 1
    del view
    assert pool.stats().allocations == 0


def test_a_freed_size_is_used_again_and_given_back_when_asked():
    pool = MemoryPool(Device("cpu"), name="again")
    first = pool.allocate(3 * MIB).ptr
    assert pool.allocate(3 * MIB).ptr == first
    stats = pool.stats()
    assert (stats.upstream_allocations, stats.total_allocations, stats.cached) == (1, 2, 4 * MIB)
    assert pool.trim(keep=8 * MIB) == 0
    assert pool.empty_cache() == 4 * MIB
    assert pool.stats().reserved == 0


def test_a_limit_raises_an_error_that_is_a_memory_error_and_the_pool_works_on():
    pool = MemoryPool("cpu", limit=4 * MIB, name="small")
    kept = pool.allocate(3 * MIB)
    with pytest.raises(
        MemoryError, match=r"'small' on cpu cannot give 2.00 MiB: 3.00 MiB in use.*limit 4.00 MiB"
    ) as caught:
        pool.allocate(2 * MIB)
    assert isinstance(caught.value, OutOfMemoryError)
    assert caught.value.device == "cpu"
    assert pool.stats().failures == 1
    del kept
    assert pool.allocate(2 * MIB).nbytes == 2 * MIB
    pool.limit = None
    assert pool.limit is None
    pool.allocate(8 * MIB)


@pytest.mark.parametrize("kind", ["caching", "direct"])
def test_more_than_any_machine_has(kind):
    pool = MemoryPool("cpu", kind)
    with pytest.raises(OutOfMemoryError, match=r"4.00 EiB.*no limit; the host has .* free of"):
        pool.allocate(1 << 62)
    assert pool.stats().current == 0
    assert pool.allocate(100)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((-1,), "size -1 is negative"),
        ((1 << 70,), "no number of bytes"),
        ((8, 2), "per-thread default stream"),
        ((8, -1), "no stream handle"),
        ((8, "stream"), "a stream is None, an integer handle"),
    ],
)
def test_wrong_sizes_and_streams_are_refused(arguments, match):
    pool = MemoryPool("cpu")
    with pytest.raises(InputError, match=match):
        pool.allocate(*arguments)


def test_wrong_calls_are_type_errors():
    pool = MemoryPool("cpu")
    for arguments, keywords in (((), {}), ((1, 2, 3), {}), ((1,), {"strm": 1}), ((1.5,), {}), (("1",), {})):
        with pytest.raises(TypeError):
            pool.allocate(*arguments, **keywords)
    with pytest.raises(TypeError):
        Buffer()


def test_streams_of_other_libraries_are_understood():
    class Torch:
        cuda_stream = 0x1000

    class Cupy:
        ptr = 0x2000

    class Any:
        def __cuda_stream__(self):
            return (0, 0x3000)

    pool = MemoryPool("cpu")
    for stream, handle in ((None, 0), (1, 0), (0x4000, 0x4000), (Torch(), 0x1000), (Cupy(), 0x2000), (Any(), 0x3000)):
        assert pool.allocate(8, stream=stream).stream == handle
        pool.allocate(8).record_stream(stream)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"kind": "arena"}, InputError, "'arena' is not known"),
        ({"kind": "driver"}, UnsupportedOperationError, "does not exist on 'cpu'"),
        ({"kind": "pinned"}, UnsupportedOperationError, "copies to and from a CUDA device"),
        ({"limit": 0}, InputError, "limit 0"),
        ({"limit": -5}, InputError, "limit -5 is negative"),
        ({"device": "cuda:99"}, CudaError, "cuda:99"),
        ({"device": -1}, InputError, "-1 is negative"),
    ],
)
def test_pools_that_cannot_be_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        MemoryPool(**{"device": "cpu", **arguments})


def test_buffers_keep_their_pool_alive():
    pool = MemoryPool("cpu", name="kept alive")
    buffer = pool.allocate(10)
    del pool
    gc.collect()
    assert "kept alive" in [pool.name for pool in memory_report().pools]
    memoryview(buffer)[0] = 1
    del buffer
    assert "kept alive" not in [pool.name for pool in memory_report().pools]


def test_the_report_says_who_holds_what():
    small, big = MemoryPool("cpu", name="small owner"), MemoryPool("cpu", limit=64 * MIB, name="big owner")
    kept = [small.allocate(100), big.allocate(20 * MIB)]
    report = memory_report("cpu")
    names = [pool.name for pool in report.pools]
    assert names.index("big owner") < names.index("small owner")
    plain = next(pool for pool in report.to_dict()["pools"] if pool["name"] == "big owner")
    assert (plain["limit"], plain["kind"], plain["stats"]["current"]) == (64 * MIB, "caching", 20 * MIB)
    line = next(line for line in str(report).splitlines() if line.startswith("big owner"))
    assert "20.0 MiB" in line
    assert "64.0 MiB" in line
    manager = MemoryManager.instance()
    assert manager.get_allocated_size("cpu") >= 20 * MIB + 512
    assert manager.get_stats().allocations >= len(kept)
    assert manager.get_allocated_size() == manager.get_stats().current
    del kept
    assert manager.empty_cache("cpu") >= 22 * MIB


def test_the_default_pool_is_one():
    manager = MemoryManager.instance()
    buffer = manager.default_pool("cpu").allocate(10)
    assert manager.default_pool(Device("cpu")).stats().allocations >= 1
    assert buffer.nbytes == 10


def test_threads_share_a_pool():
    pool = MemoryPool("cpu", limit=64 * MIB)
    errors = []

    def work(value):
        for size in range(1, 400):
            try:
                view = np.frombuffer(pool.allocate(size * 997 % 100_000 + 1), dtype=np.uint8)
                view[:] = value
                if not (view == value).all():
                    errors.append("two threads got the same memory")
            except XpuRuntimeError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pool.stats().current == 0


def test_a_million_buffers_leave_nothing_behind():
    pool = MemoryPool("cpu")
    process = psutil.Process()

    def rounds(count):
        for _ in range(count):
            pool.allocate(4096)

    rounds(100_000)
    objects, memory = sys.getrefcount(Buffer), process.memory_info().rss
    rounds(1_000_000)
    assert process.memory_info().rss - memory < 2 * MIB
    assert sys.getrefcount(Buffer) == objects
    assert pool.stats().upstream_allocations == 1


class TestEngineAllocator:
    """The C functions an engine would call."""

    @staticmethod
    def functions(allocator):
        alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(allocator.alloc_address)
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(allocator.free_address)
        empty = ctypes.CFUNCTYPE(None)(allocator.empty_cache_address)
        return alloc, free, empty

    def test_allocates_from_the_pool(self):
        pool = MemoryPool("cpu", name="engine")
        allocator = EngineAllocator(pool, None)
        alloc, free, empty = self.functions(allocator)
        pointer = alloc(5000)
        ctypes.memset(pointer, 1, 5000)
        assert pool.stats().requested == allocator.stats().current == 5000
        assert allocator.pool.name == "engine"
        free(pointer)
        empty()
        assert (pool.stats().reserved, allocator.stats().total_allocations) == (0, 1)
        assert allocator.take_failure() is None
        allocator.raise_failure()

    def test_a_failure_is_told_afterwards(self):
        allocator = EngineAllocator(MemoryPool("cpu", limit=MIB))
        alloc, _, _ = self.functions(allocator)
        assert alloc(2 * MIB) is None
        assert "limit 1.00 MiB" in allocator.take_failure()
        assert alloc(2 * MIB) is None
        with pytest.raises(OutOfMemoryError, match=r"cannot give 2\.00 MiB"):
            allocator.raise_failure()
        allocator.raise_failure()

    def test_slots_run_out_and_come_back(self):
        pool = MemoryPool("cpu")
        free = EngineAllocator.available()
        taken = [EngineAllocator(pool) for _ in range(free)]
        with pytest.raises(UnsupportedOperationError, match="all 64 engine allocators"):
            EngineAllocator(pool)
        taken[0].close()
        assert taken[0].closed
        with pytest.raises(UnsupportedOperationError, match="closed"):
            taken[0].stats()
        EngineAllocator(pool).close()
        taken.clear()
        assert EngineAllocator.available() == free
        with pytest.raises(InputError, match="a MemoryPool is needed"):
            EngineAllocator("pool")


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64", "complex128"])
def test_strided_arrays_are_made_contiguous(dtype):
    base = np.arange(4 * 5 * 6).reshape(4, 5, 6).astype(dtype)
    for view in (
        base,
        base.T,
        base[::2, ::-1, 1::3],
        base.transpose(1, 0, 2),
        np.broadcast_to(base[:, :1], base.shape),
    ):
        out = np.empty(view.shape, dtype)
        steps = [stride // view.itemsize for stride in view.strides]
        copy_to_contiguous("cpu", view.ctypes.data, out.ctypes.data, view.shape, steps, view.itemsize)
        np.testing.assert_array_equal(out, view)
    with pytest.raises(InputError, match="itemsize 3"):
        copy_to_contiguous("cpu", base.ctypes.data, base.ctypes.data, [1], [1], 3)
