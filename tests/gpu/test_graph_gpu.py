# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""CUDA graphs: capture, instantiate, replay, update, and what must not happen in a capture."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch_work import LONG, keep_busy, on, warm_up

from xpuruntime.errors import CudaError, InputError
from xpuruntime.runtime.memory import MemoryPool
from xpuruntime.runtime.stream import Graph, Stream, Tensor

COUNT = 1 << 14


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    warm_up()


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch.cuda.synchronize()


def full(value: float) -> torch.Tensor:
    tensor = torch.full((COUNT,), value, device="cuda")
    torch.cuda.synchronize()
    return tensor


def values(tensor: torch.Tensor) -> set[float]:
    torch.cuda.synchronize()
    return set(tensor.tolist())


def usable(stream: Stream) -> bool:
    """Whether a stream takes and does work, and is in no capture."""
    if stream.capturing:
        return False
    target = full(0.0)
    with on(stream):
        target.fill_(3.0)
    stream.synchronize()
    return values(target) == {3.0}


def add_one(stream: Stream, source: torch.Tensor, target: torch.Tensor, *, instantiate: bool = True) -> Graph:
    graph = Graph()
    with graph.capture(stream, instantiate=instantiate), on(stream):
        torch.add(source, 1.0, out=target)
    return graph


def test_capture_replay() -> None:
    stream = Stream("cuda:0")
    source, middle, target = full(1.0), full(0.0), full(0.0)
    ours = Tensor.from_dlpack(source, stream)
    between = Tensor.from_dlpack(middle, stream)
    graph = Graph()
    with graph.capture(stream) as captured:
        assert captured.capturing
        assert stream.capturing
        between.copy_(ours, stream=stream)
        with on(stream):
            torch.add(middle, 1.0, out=target)
    assert not stream.capturing
    assert (graph.captured, graph.instantiated, graph.device) == (True, True, "cuda:0")
    assert graph.node_count == 2, f"one copy and one kernel make {graph.node_count} nodes"
    assert values(target) == {0.0}, "captured work ran during the capture"
    for value in (1.0, 10.0, 100.0):
        source.fill_(value)
        torch.cuda.synchronize()
        graph.replay(stream)
        stream.synchronize()
        assert values(target) == {value + 1.0}, f"replay with {value}"


def test_replay_on_another_stream_in_its_order() -> None:
    stream, other = Stream("cuda:0"), Stream("cuda:0")
    source, target = full(1.0), full(0.0)
    graph = add_one(stream, source, target)
    del stream
    gc.collect()
    keep_busy(other)
    with on(other):
        source.fill_(7.0)
    graph.replay(other)
    assert not other.query(), "replay waited"
    assert graph.instantiated
    other.synchronize()
    assert values(target) == {8.0}


def test_update_in_place() -> None:
    stream = Stream("cuda:0")
    a, b, c, d = full(1.0), full(0.0), full(20.0), full(0.0)
    graph = add_one(stream, a, b)
    newer = add_one(stream, c, d, instantiate=False)
    assert not newer.instantiated
    result = graph.update(newer)
    assert result.in_place, f"same topology, other addresses, and yet: {result.reason}"
    assert result.reason is None
    del newer
    gc.collect()
    graph.replay(stream)
    stream.synchronize()
    assert (values(b), values(d)) == ({0.0}, {21.0}), "the updated graph works on the new addresses only"


def test_update_that_cannot_be_done_in_place() -> None:
    stream = Stream("cuda:0")
    a, b, c = full(1.0), full(0.0), full(0.0)
    graph = add_one(stream, a, b)
    newer = Graph()
    with newer.capture(stream, instantiate=False), on(stream):
        torch.add(a, 1.0, out=b)
        torch.mul(b, 2.0, out=c)
    assert graph.node_count == 1
    result = graph.update(newer)
    assert not result.in_place
    assert result.reason is not None
    assert "differ" in result.reason, result.reason
    assert "reason=" in repr(result)
    assert graph.node_count == 2
    graph.replay(stream)
    stream.synchronize()
    assert (values(b), values(c)) == ({2.0}, {4.0})
    assert torch.ones(2, device="cuda").sum().item() == 2.0, "an error stayed behind in CUDA"


def test_update_while_the_old_work_still_runs() -> None:
    stream = Stream("cuda:0")
    a, b, c = full(1.0), full(0.0), full(0.0)
    graph = add_one(stream, a, b)
    newer = Graph()
    with newer.capture(stream, instantiate=False), on(stream):
        torch.mul(a, 5.0, out=c)
        torch.mul(a, 5.0, out=c)
    keep_busy(stream)
    graph.replay(stream)
    assert not graph.update(newer).in_place
    graph.replay(stream)
    assert not stream.query(), "update waited for the replay"
    stream.synchronize()
    assert (values(b), values(c)) == ({2.0}, {5.0})


def test_illegal_operation_in_a_capture() -> None:
    stream = Stream("cuda:0")
    source, target = full(1.0), full(0.0)
    graph = Graph()
    with pytest.raises(CudaError, match=r"cannot be captured.*move") as caught, graph.capture(stream):
        stream.synchronize()
    assert caught.value.device == "cuda:0"
    assert caught.value.status == 900
    assert not graph.captured
    assert usable(stream)
    with graph.capture(stream), on(stream):
        torch.add(source, 1.0, out=target)
    graph.replay(stream)
    stream.synchronize()
    assert values(target) == {2.0}, "the graph could not be captured again"


def test_illegal_operation_that_the_block_swallows() -> None:
    stream = Stream("cuda:0")
    graph = Graph()
    graph.begin_capture(stream)
    with pytest.raises(CudaError, match="cannot be captured"):
        stream.synchronize()
    with pytest.raises(CudaError, match="spoiled it") as caught:
        graph.end_capture()
    assert caught.value.status == 901
    assert not graph.capturing
    assert usable(stream)


def test_exception_in_the_block_is_the_one_that_is_seen() -> None:
    stream = Stream("cuda:0")
    graph = Graph()
    with pytest.raises(KeyboardInterrupt), graph.capture(stream):
        raise KeyboardInterrupt
    assert not graph.capturing
    assert not graph.captured
    assert usable(stream)


def test_stream_that_joins_and_is_not_joined_back() -> None:
    stream, side = Stream("cuda:0"), Stream("cuda:0")
    a, b = full(1.0), full(0.0)
    graph = Graph()

    def fork() -> None:
        with graph.capture(stream):
            side.wait_stream(stream)
            with on(side):
                torch.add(a, 1.0, out=b)

    with pytest.raises(CudaError, match="never joined back") as caught:
        fork()
    assert caught.value.status == 904
    assert usable(stream)
    assert usable(side)


def test_fork_and_join() -> None:
    stream, side = Stream("cuda:0"), Stream("cuda:0")
    a, b, c = full(1.0), full(0.0), full(0.0)
    graph = Graph()
    with graph.capture(stream):
        side.wait_stream(stream)
        assert side.capturing
        with on(side):
            torch.add(a, 1.0, out=b)
        with on(stream):
            torch.mul(a, 2.0, out=c)
        stream.wait_stream(side)
    assert not side.capturing
    assert graph.node_count == 2
    graph.replay(stream)
    stream.synchronize()
    assert (values(b), values(c)) == ({2.0}, {2.0})


def test_steps_out_of_order() -> None:
    stream = Stream("cuda:0")
    a, b = full(1.0), full(0.0)
    graph = Graph()
    for default in (Stream.default("cuda:0"), Stream.wrap("cuda:0", 1), Stream.wrap("cuda:0", 2)):
        with pytest.raises(InputError, match=r"default stream of cuda:0 cannot be captured"):
            graph.begin_capture(default)
    graph.begin_capture(stream)
    with pytest.raises(InputError, match="being captured already"):
        graph.begin_capture(stream)
    with pytest.raises(InputError, match="being captured already"):
        Graph().begin_capture(stream)
    with pytest.raises(InputError, match="end its capture"):
        graph.instantiate()
    with on(stream):
        torch.add(a, 1.0, out=b)
    graph.end_capture()
    with pytest.raises(InputError, match=r"not instantiated: call instantiate\(\)"):
        graph.replay(stream)
    with pytest.raises(InputError, match="holds captured work already"):
        graph.begin_capture(stream)
    with pytest.raises(InputError, match=r"call instantiate\(\) before update"):
        graph.update(add_one(stream, a, b, instantiate=False))
    graph.instantiate()
    graph.instantiate()
    with pytest.raises(InputError, match=r"graph of cuda:0 cannot be replayed on a stream of cpu"):
        graph.replay(Stream("cpu"))
    with pytest.raises(InputError, match="capture some"):
        graph.update(Graph())
    graph.replay(stream)
    stream.synchronize()
    assert values(b) == {2.0}


def test_other_threads_do_not_break_a_capture() -> None:
    stream = Stream("cuda:0")
    a, b = full(1.0), full(0.0)
    problems: list[str] = []

    def disturb() -> None:
        try:
            own = Stream("cuda:0")
            tensor = Tensor.empty((1 << 20,), device="cuda:0", pool=MemoryPool("cuda:0", "direct"), stream=own)
            own.synchronize()
            del tensor
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    graph = Graph()
    with graph.capture(stream):
        thread = threading.Thread(target=disturb)
        thread.start()
        thread.join()
        with on(stream):
            torch.add(a, 1.0, out=b)
    assert problems == []
    graph.replay(stream)
    stream.synchronize()
    assert values(b) == {2.0}


def test_capture_ends_on_the_thread_that_began_it() -> None:
    stream = Stream("cuda:0")
    a, b = full(1.0), full(0.0)
    graph = Graph()
    graph.begin_capture(stream)
    with on(stream):
        torch.add(a, 1.0, out=b)
    seen: list[BaseException] = []

    def end() -> None:
        try:
            graph.end_capture()
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert len(seen) == 1, "another thread ended the capture"
    assert isinstance(seen[0], CudaError)
    assert "thread that began it" in str(seen[0])
    assert not graph.capturing, "CUDA ends a capture that the wrong thread tried to end"
    with pytest.raises(InputError, match="not being captured"):
        graph.end_capture()
    with on(stream):
        b.fill_(7.0)
    stream.synchronize()
    assert values(b) == {7.0}, "the stream does not work after the lost capture"


def test_dropping_a_graph_in_the_middle_of_its_capture() -> None:
    stream = Stream("cuda:0")
    graph = Graph()
    graph.begin_capture(stream)
    assert stream.capturing
    del graph
    gc.collect()
    assert usable(stream)


def test_dropping_a_graph_while_it_runs() -> None:
    stream = Stream("cuda:0")
    a, b = full(1.0), full(0.0)
    graph = Graph()
    with graph.capture(stream), on(stream):
        torch.cuda._sleep(LONG)
        torch.add(a, 1.0, out=b)
    gc.collect()  # not after the replay: it can take longer than the graph
    graph.replay(stream)
    del graph
    assert not stream.query(), "dropping the graph waited for it"
    stream.synchronize()
    assert values(b) == {2.0}


def test_capture_refuses_memory_that_another_stream_writes() -> None:
    stream, other = Stream("cuda:0"), Stream("cuda:0")
    source = Tensor.empty((COUNT,), device="cuda:0", stream=other)
    target = Tensor.empty((COUNT,), device="cuda:0", stream=stream)
    with on(other):
        torch.from_dlpack(source).fill_(6.0)
    source.record(other)
    graph = Graph()
    graph.begin_capture(stream)
    with pytest.raises(InputError, match=r"order_on\(stream\)"):
        target.copy_(source, stream=stream)
    graph.end_capture()
    assert graph.node_count == 0
    source.order_on(stream)
    graph = Graph()
    with graph.capture(stream):
        target.copy_(source, stream=stream)
    graph.replay(stream)
    assert set(target.to("cpu", stream=stream).numpy().tolist()) == {6.0}


def test_threads_replay_one_graph() -> None:
    stream = Stream("cuda:0")
    counter = full(0.0)
    graph = Graph()
    with graph.capture(stream), on(stream):
        torch.add(counter, 1.0, out=counter)
    threads = [threading.Thread(target=lambda: [graph.replay(stream) for _ in range(50)]) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.synchronize()
    assert values(counter) == {800.0}, "each of 16 times 50 replays adds one"
