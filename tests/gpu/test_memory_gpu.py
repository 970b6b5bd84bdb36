# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory pools on a CUDA device: kinds, limits, real exhaustion, and reuse between streams."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest
from device_arrays import tensor_of, to_host

import xpuruntime as xrt
from xpuruntime._core import EngineAllocator, MemoryManager, copy_to_contiguous
from xpuruntime.errors import InputError, OutOfMemoryError
from xpuruntime.runtime.memory import MemoryPool, memory_report
from xpuruntime.runtime.stream import Stream, Tensor

MIB = 1 << 20
KINDS = ("caching", "direct", "driver", "pinned")


def full(value: float, count: int) -> Tensor:
    return Tensor.from_numpy(np.full(count, value, np.float32)).to("cuda:0")


def copy(source: int, target: int, count: int, stream: Stream, times: int = 1) -> None:
    for _ in range(times):
        copy_to_contiguous("cuda:0", source, target, [count], [1], 4, stream)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_memory_that_works(kind: str) -> None:
    pool = MemoryPool("cuda:0", kind, name=f"test {kind}")
    stream = Stream("cuda:0")
    buffer = pool.allocate(4 * MIB, stream)
    assert buffer.ptr % 256 == 0
    assert buffer.device == ("cpu" if kind == "pinned" else "cuda:0")
    if kind == "pinned":
        view = np.frombuffer(buffer, np.float32)
        view[:] = 3
        target_buffer = MemoryPool("cuda:0").allocate(4 * MIB, stream)
        copy(buffer.ptr, target_buffer.ptr, MIB, stream)
        stream.synchronize()
        np.testing.assert_array_equal(to_host(target_buffer, (MIB,), np.float32), view)
    else:
        with pytest.raises(BufferError, match="cuda:0"):
            memoryview(buffer)
        source = full(7, MIB)
        source.synchronize()
        copy(source.data_ptr, buffer.ptr, MIB, stream)
        stream.synchronize()
        assert (to_host(buffer, (MIB,), np.float32) == 7).all()
    stats = pool.stats()
    assert stats.current >= 4 * MIB
    assert stats.reserved >= stats.current
    gc.collect()
    del buffer
    if kind == "pinned":
        del view
    xrt.synchronize(0)
    pool.empty_cache()
    assert pool.stats().current == 0
    assert pool.stats().reserved == 0


@pytest.mark.parametrize("kind", ["caching", "direct", "driver"])
def test_ten_terabytes_are_refused_and_the_pool_works_on(kind: str) -> None:
    pool = MemoryPool("cuda:0", kind, name="greedy")
    kept = pool.allocate(64 * MIB)
    with pytest.raises(
        OutOfMemoryError, match=r"'greedy' on cuda:0 cannot give 10\.00 TiB: .*cuda:0 has .* free of"
    ) as caught:
        pool.allocate(10 << 40)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.device == "cuda:0"
    assert pool.stats().failures == 1
    assert pool.allocate(64 * MIB).nbytes == kept.nbytes
    xrt.synchronize(0)  # no error is left behind


def test_the_cache_is_given_back_when_the_device_is_full() -> None:
    pool = MemoryPool("cuda:0", name="most of it")
    free = xrt.Device(0).free_memory
    share = free // 10 * 6
    pool.allocate(share)
    assert pool.stats().cached >= share
    other = pool.allocate(free // 10 * 7)  # does not fit beside what is cached
    assert pool.stats().upstream_allocations >= 3
    del other
    assert pool.empty_cache() >= free // 10 * 7
    assert xrt.Device(0).free_memory > free // 10 * 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_holds(kind: str) -> None:
    pool = MemoryPool("cuda:0", kind, limit=64 * MIB)
    kept = pool.allocate(40 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"limit 64\.00 MiB"):
        pool.allocate(40 * MIB)
    del kept
    assert pool.allocate(40 * MIB).nbytes == 40 * MIB


def test_the_same_stream_gets_its_block_at_once() -> None:
    pool = MemoryPool("cuda:0")
    stream = Stream("cuda:0")
    source = full(1, 64 * MIB)
    source.synchronize()
    buffer = pool.allocate(256 * MIB, stream)
    pointer = buffer.ptr
    copy(source.data_ptr, pointer, 64 * MIB, stream, times=50)
    del buffer
    again = pool.allocate(256 * MIB, stream)
    assert again.ptr == pointer
    assert not stream.query()  # nobody waited


def test_another_stream_gets_the_block_behind_an_event() -> None:
    count = 64 * MIB
    pool = MemoryPool("cuda:0", limit=4 * count)
    first, second = Stream("cuda:0"), Stream("cuda:0")
    ones, twos = full(1, count), full(2, count)
    xrt.synchronize(0)
    buffer = pool.allocate(4 * count, first)
    pointer = buffer.ptr
    copy(ones.data_ptr, pointer, count, first, times=100)
    del buffer
    other = pool.allocate(4 * count, second)  # the only memory that the limit allows
    assert other.ptr == pointer
    assert not first.query()  # the host did not wait
    copy(twos.data_ptr, pointer, count, second)
    second.synchronize()
    assert first.query()  # the second stream did
    assert (to_host(other, (count,), np.float32) == 2).all()


def test_a_recorded_stream_holds_the_block_back() -> None:
    count = 64 * MIB
    pool = MemoryPool("cuda:0")
    owner, user = Stream("cuda:0"), Stream("cuda:0")
    ones = full(1, count)
    xrt.synchronize(0)
    buffer = pool.allocate(4 * count, owner)
    pointer = buffer.ptr
    buffer.record_stream(user)
    copy(ones.data_ptr, pointer, count, user, times=100)
    del buffer
    assert pool.stats().pending == 4 * count
    early = pool.allocate(4 * count, owner)
    assert early.ptr != pointer
    user.synchronize()
    assert pool.allocate(4 * count, owner).ptr == pointer
    assert pool.stats().pending == 0


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_outlive_their_stream(kind: str) -> None:
    pool = MemoryPool("cuda:0", kind)
    for _ in range(20):
        stream, user = Stream("cuda:0"), Stream("cuda:0")
        buffer = pool.allocate(8 * MIB, stream)
        buffer.record_stream(user)
        del stream, user
        del buffer
    xrt.synchronize(0)
    pool.empty_cache()
    assert pool.stats().reserved == 0


def test_pinned_memory_is_not_reused_while_a_copy_reads_it() -> None:
    count = 64 * MIB
    pinned = MemoryPool("cuda:0", "pinned")
    stream = Stream("cuda:0")
    targets = [MemoryPool("cuda:0").allocate(4 * count, stream) for _ in range(4)]
    pointers = set()
    for value, target in enumerate(targets):
        buffer = pinned.allocate(4 * count, stream)
        pointers.add(buffer.ptr)
        np.frombuffer(buffer, np.float32)[:] = value
        copy(buffer.ptr, target.ptr, count, stream)
        del buffer
    stream.synchronize()
    for value, target in enumerate(targets):
        assert (to_host(target, (count,), np.float32) == value).all()
    assert pinned.allocate(4 * count, stream).ptr in pointers


def test_memory_of_a_graph_is_not_disturbed_by_other_allocations() -> None:
    pool = MemoryPool("cuda:0")
    stream = Stream("cuda:0")
    source = full(5, MIB)
    target = pool.allocate(4 * MIB, stream)
    xrt.synchronize(0)
    graph = xrt.Graph()
    with graph.capture(stream):
        inside = pool.allocate(4 * MIB, stream)  # asks the device while the stream is captured
        copy(source.data_ptr, inside.ptr, MIB, stream)
        copy(inside.ptr, target.ptr, MIB, stream)
    for _ in range(3):
        pool.allocate(4 * MIB, stream)
        graph.replay(stream)
    stream.synchronize()
    assert (to_host(target, (MIB,), np.float32) == 5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_pool(kind: str) -> None:
    pool = MemoryPool("cuda:0", kind, limit=2 << 30)
    errors: list[str] = []

    def work(value: int) -> None:
        try:
            stream = Stream("cuda:0")
            source = full(value, MIB)
            source.synchronize()
            for _ in range(50):
                buffer = pool.allocate(4 * MIB, stream)
                copy(source.data_ptr, buffer.ptr, MIB, stream)
                stream.synchronize()
                pinned = kind == "pinned"
                values = np.frombuffer(buffer, np.float32) if pinned else to_host(buffer, (MIB,), np.float32)
                if not (values == value).all():
                    errors.append(f"thread {value} saw values of another")
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    gc.collect()
    assert pool.stats().current == 0


def test_the_per_thread_default_stream_is_refused() -> None:
    with pytest.raises(InputError, match="per-thread default stream"):
        MemoryPool("cuda:0").allocate(10, 2)


def test_an_engine_allocates_device_memory() -> None:
    pool = MemoryPool("cuda:0", limit=64 * MIB, name="an engine's")
    stream = Stream("cuda:0")
    allocator = EngineAllocator(pool, stream)
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(allocator.alloc_address)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(allocator.free_address)
    pointer = alloc(16 * MIB)
    source = full(2, MIB)
    source.synchronize()
    copy(source.data_ptr, pointer, MIB, stream)
    stream.synchronize()
    assert "an engine's" in str(memory_report("cuda:0"))
    assert alloc(64 * MIB) is None
    with pytest.raises(OutOfMemoryError, match="limit"):
        allocator.raise_failure()
    free(pointer)
    assert MemoryManager.instance().get_allocated_size("cuda:0") >= 0
    assert pool.stats().current == 0


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64", "complex128"])
def test_strided_arrays_are_made_contiguous(dtype: str) -> None:
    base = (np.arange(70 * 65 * 40) % 120).reshape(70, 65, 40).astype(dtype)
    device = Tensor.from_numpy(base).to("cuda:0")
    device.synchronize()
    pool, stream = MemoryPool("cuda:0"), Stream("cuda:0")
    views = {
        "whole": base,
        "reversed axes": base.T,
        "swapped last axes": base.transpose(0, 2, 1),
        "swapped first axes": base.transpose(1, 0, 2),
        "one matrix": base[3].T,
        "steps": base[::2, ::-1, 1::3],
        "repeated": np.broadcast_to(base[:, :1], base.shape),
        "8 dimensions": base.reshape(2, 5, 7, 5, 13, 5, 4, 2).transpose(7, 1, 5, 3, 0, 2, 6, 4),
    }
    for name, view in views.items():
        offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        steps = [step // view.itemsize for step in view.strides]
        out = pool.allocate(view.nbytes, stream)
        copy_to_contiguous("cuda:0", device.data_ptr + offset, out.ptr, view.shape, steps, view.itemsize, stream)
        stream.synchronize()
        np.testing.assert_array_equal(to_host(out, view.shape, dtype), view, err_msg=name)


def test_a_tensor_over_a_buffer_keeps_it() -> None:
    pool = MemoryPool("cuda:0")
    tensor = tensor_of(pool.allocate(4 * MIB), (MIB,), np.float32)
    gc.collect()
    assert pool.stats().allocations == 1
    del tensor
    gc.collect()
    assert pool.stats().allocations == 0
