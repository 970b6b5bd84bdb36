# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Streams and events on a CUDA device. Order is proven against a kernel that is known to be still running."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from torch_work import LONG, keep_busy, on, warm_up

from xpuruntime.errors import CudaError, InputError, UnsupportedOperationError
from xpuruntime.runtime.stream import Event, Stream, StreamManager, Tensor

COUNT = 1 << 16


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    warm_up()


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch.cuda.synchronize()


def test_priorities() -> None:
    least, greatest = Stream.priority_range("cuda:0")
    assert greatest < least, f"this device has one priority only: ({least}, {greatest})"
    for priority in range(greatest, least + 1):
        stream = Stream("cuda:0", priority=priority)
        assert stream.priority == priority
        assert Stream.wrap("cuda:0", stream).priority == priority, "CUDA made the stream with another priority"
    for priority in (least + 1, greatest - 1):
        with pytest.raises(InputError, match=rf"priority {priority} is out of range on cuda:0: choose from {greatest}"):
            Stream("cuda:0", priority=priority)


@pytest.mark.parametrize("non_blocking", [True, False])
def test_non_blocking_is_what_cuda_says(non_blocking: bool) -> None:
    stream = Stream("cuda:0", non_blocking=non_blocking)
    assert stream.non_blocking is non_blocking
    assert Stream.wrap("cuda:0", stream).non_blocking is non_blocking


def test_query_and_synchronize() -> None:
    stream = Stream("cuda:0")
    assert stream.query(), "a new stream has no work"
    keep_busy(stream)
    assert not stream.query(), "the long kernel was done at once: it proves nothing"
    started = time.perf_counter()
    stream.synchronize()
    waited = time.perf_counter() - started
    assert stream.query()
    assert waited > 0.02, f"synchronize returned after {waited * 1e3:.2f} ms, before the kernel of about 100 ms"


def test_synchronize_lets_other_threads_run() -> None:
    stream = Stream("cuda:0")
    event = Event("cuda:0")
    beats: list[float] = []
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=beat)
    thread.start()
    keep_busy(stream)
    before = len(beats)
    stream.synchronize()
    after_stream = len(beats)
    keep_busy(stream)
    event.record(stream)
    event.synchronize()
    after_event = len(beats)
    done.set()
    thread.join()
    assert after_stream - before >= 10, f"stream.synchronize() held the GIL: {after_stream - before} beats in 100 ms"
    assert after_event - after_stream >= 10, f"event.synchronize() held the GIL: {after_event - after_stream} beats"


@pytest.mark.parametrize("how", ["wait_event", "wait_stream", "nothing"])
def test_one_stream_waits_for_another(how: str) -> None:
    first, second = Stream("cuda:0"), Stream("cuda:0")
    source = torch.zeros(COUNT, device="cuda")
    target = torch.full((COUNT,), -1.0, device="cuda")
    torch.cuda.synchronize()
    keep_busy(first)
    with on(first):
        source.fill_(1.0)
    if how == "wait_event":
        second.wait_event(first.record())
    elif how == "wait_stream":
        second.wait_stream(first)
    with on(second):
        target.copy_(source)
    assert not first.query(), f"{how}: the host waited, or the long kernel was too short"
    second.synchronize()
    expected = 0.0 if how == "nothing" else 1.0
    seen = sorted(set(target.tolist()))
    assert seen == [expected], f"{how}: the second stream read {seen}, expected {expected}"
    torch.cuda.synchronize()


def test_event_states() -> None:
    stream = Stream("cuda:0")
    event = Event("cuda:0")
    assert event.query(), "an event that was never recorded counts as complete"
    assert event.handle != 0
    keep_busy(stream)
    event.record(stream)
    assert not event.query()
    event.synchronize()
    assert event.query()
    event.record(stream)
    event.synchronize()


def test_elapsed_time_agrees_with_torch() -> None:
    stream = Stream("cuda:0")
    with on(stream):
        torch_start, torch_end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch_start.record()
        start = stream.record(timing=True)
        torch.cuda._sleep(LONG)
        end = stream.record(timing=True)
        torch_end.record()
    with pytest.raises(InputError, match=r"end\.synchronize\(\)"):
        start.elapsed_us(end)
    end.synchronize()
    torch_end.synchronize()
    ours, theirs = start.elapsed_us(end), torch_start.elapsed_time(torch_end) * 1000
    assert ours > 20_000, f"{ours} µs for a kernel of about 100 ms"
    assert ours <= theirs + 1, f"ours {ours} µs lies inside of torch's {theirs} µs"
    assert ours > 0.95 * theirs, f"ours {ours} µs, torch's {theirs} µs"


def test_elapsed_time_needs_timed_recorded_events_of_one_device() -> None:
    stream = Stream("cuda:0")
    timed, plain = stream.record(timing=True), stream.record()
    stream.synchronize()
    with pytest.raises(InputError, match="create both with timing=True"):
        timed.elapsed_us(plain)
    with pytest.raises(InputError, match="create both with timing=True"):
        plain.elapsed_us(timed)
    with pytest.raises(InputError, match="record both on a stream"):
        timed.elapsed_us(Event("cuda:0", timing=True))
    with pytest.raises(InputError, match="do not share a clock"):
        timed.elapsed_us(Stream("cpu").record(timing=True))
    assert timed.elapsed_us(timed) == 0.0
    assert torch.ones(2, device="cuda").sum().item() == 2.0, "an error stayed behind in CUDA"


def test_cpu_and_cuda_together() -> None:
    cpu, cuda = Stream("cpu"), Stream("cuda:0")
    cuda.wait_event(cpu.record())
    cuda.wait_stream(cpu)
    for act in (lambda: cpu.wait_event(cuda.record()), lambda: cpu.wait_stream(cuda)):
        with pytest.raises(UnsupportedOperationError, match=r"without blocking.*synchronize\(\)"):
            act()
    with pytest.raises(InputError, match=r"event of cuda:0 cannot be recorded on a stream of cpu"):
        Event("cuda:0").record(cpu)


def test_device_that_is_not_there() -> None:
    for make in (
        lambda: Stream("cuda:99"),
        lambda: Event("cuda:99"),
        lambda: Stream.wrap("cuda:99", 0),
        lambda: Stream.default("cuda:99"),
        lambda: Stream.priority_range("cuda:99"),
        lambda: StreamManager.instance().pooled("cuda:99"),
    ):
        with pytest.raises(CudaError, match="cuda:99"):
            make()
    assert torch.ones(2, device="cuda").sum().item() == 2.0, "an error stayed behind in CUDA"


def test_current_device_is_restored() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.set_device(index)
        for other in range(torch.cuda.device_count()):
            stream = Stream(f"cuda:{other}")
            event = stream.record(timing=True)
            stream.wait_event(event)
            stream.synchronize()
            del stream, event
            assert torch.cuda.current_device() == index, f"work on cuda:{other} left another current device"
    torch.cuda.set_device(0)


def test_default_stream() -> None:
    stream = Stream.default("cuda:0")
    assert (stream.handle, stream.owned, stream.non_blocking) == (0, False, False)
    assert stream == StreamManager.instance().default_stream("cuda:0")
    assert stream != Stream("cuda:0")
    torch.cuda._sleep(LONG)  # PyTorch's own default stream is the legacy one.
    assert not stream.query()
    stream.synchronize()
    assert stream.query()


def test_foreign_streams_are_used_and_left_alone() -> None:
    theirs = torch.cuda.Stream()
    ours = Stream.wrap("cuda:0", theirs)
    assert (ours.handle, ours.owned) == (theirs.cuda_stream, False)
    assert ours.priority == theirs.priority
    with torch.cuda.stream(theirs):
        torch.cuda._sleep(LONG)
    assert not ours.query()
    ours.synchronize()
    assert theirs.query()
    del ours
    gc.collect()
    with torch.cuda.stream(theirs):
        assert torch.ones(4, device="cuda").sum().item() == 4.0, "dropping our handle destroyed torch's stream"


def test_cupy_streams_both_ways() -> None:
    cupy = pytest.importorskip("cupy")
    theirs = cupy.cuda.Stream(non_blocking=True)
    ours = Stream.wrap("cuda:0", theirs)
    assert ours.handle == theirs.ptr
    with theirs:
        array = cupy.arange(1000)
    ours.synchronize()
    assert int(array[-1]) == 999
    assert ours.__cuda_stream__() == (0, theirs.ptr)
    made_here = Stream("cuda:0")
    with cupy.cuda.Stream.from_external(made_here):
        assert int(cupy.arange(10).sum()) == 45


def test_dropping_a_stream_waits_for_nothing_and_loses_nothing() -> None:
    stream = Stream("cuda:0")
    target = torch.zeros(COUNT, device="cuda")
    gc.collect()  # what earlier tests left may wait for the device when it goes
    torch.cuda.synchronize()
    keep_busy(stream)
    with on(stream):
        target.fill_(5.0)
    event = stream.record()
    started = time.perf_counter()
    del stream
    took = time.perf_counter() - started
    assert not event.query(), f"dropping the stream waited for its work ({took * 1e3:.1f} ms)"
    event.synchronize()
    assert target.eq(5.0).all().item()


def test_stream_may_be_dropped_before_memory_that_was_made_on_it() -> None:
    tensors = []
    for value in range(32):
        stream = Stream("cuda:0")
        tensor = Tensor.empty((COUNT,), device="cuda:0", stream=stream)
        with on(stream):
            torch.from_dlpack(tensor).fill_(value)
        tensor.record(stream)
        tensors.append(tensor)
        del stream
    gc.collect()
    for value, tensor in enumerate(tensors):
        seen = set(tensor.to("cpu").numpy().tolist())
        assert seen == {float(value)}, f"tensor {value} holds {seen}"


def test_pooled_streams_come_in_turn() -> None:
    manager = StreamManager.instance()
    first = [manager.pooled("cuda:0") for _ in range(8)]
    again = [manager.pooled("cuda:0") for _ in range(8)]
    assert len({stream.handle for stream in first}) == 8, "eight in a row are eight streams"
    assert {stream.handle for stream in again} == {stream.handle for stream in first}
    high = manager.pooled("cuda:0", priority=manager.priority_range("cuda:0")[1])
    assert high.handle not in {stream.handle for stream in first}
    assert high.priority == manager.priority_range("cuda:0")[1]


def test_sixteen_threads_with_their_own_streams() -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            stream, side = Stream("cuda:0"), Stream("cuda:0")
            source = Tensor.empty((COUNT,), device="cuda:0", stream=stream)
            target = Tensor.empty((COUNT,), device="cuda:0", stream=side)
            for turn in range(20):
                value = float(number * 100 + turn)
                with on(stream):
                    torch.from_dlpack(source).fill_(value)
                source.record(stream)
                target.copy_(source, stream=side)
                start = side.record(timing=True)
                end = side.record(timing=True)
                end.synchronize()
                if start.elapsed_us(end) < 0:
                    failures.append(f"thread {number}: time ran backwards")
                seen = set(target.to("cpu", stream=side).numpy().tolist())
                if seen != {value}:
                    failures.append(f"thread {number}, turn {turn}: expected {value}, read {sorted(seen)[:4]}")
                stream.wait_stream(side)
        except Exception as error:
            failures.append(f"thread {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
