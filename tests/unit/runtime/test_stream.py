# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Streams, events and graphs on the CPU: the same program as on a GPU, with everything done at once."""

import time

import pytest

from xpuruntime.errors import CudaError, InputError, UnsupportedOperationError
from xpuruntime.runtime.stream import Event, Graph, Stream, StreamManager, Tensor


def test_cpu_stream_is_always_complete():
    stream = Stream("cpu")
    assert stream.device == "cpu"
    assert stream.handle == 0
    assert stream.priority == 0
    assert not stream.capturing
    stream.abort_capture()
    assert stream.query()
    stream.synchronize()
    stream.wait_stream(Stream("cpu"))
    stream.wait_event(stream.record())
    stream.wait_event(Event("cpu"))
    assert "cpu" in repr(stream)


def test_priority_out_of_range_is_refused():
    assert Stream.priority_range("cpu") == (0, 0)
    for priority in (-1, 1):
        with pytest.raises(InputError, match=rf"priority {priority} is out of range on cpu: choose from 0"):
            Stream("cpu", priority=priority)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "", None, "cpu:1"])
def test_wrong_device_names(device):
    with pytest.raises(InputError):
        Stream(device)
    with pytest.raises(InputError):
        Event(device)


def test_device_that_is_not_there():
    for make in (lambda: Stream("cuda:99"), lambda: Event("cuda:99"), lambda: Stream.wrap("cuda:99", 0)):
        with pytest.raises((CudaError, UnsupportedOperationError), match="cuda:99"):
            make()


def test_foreign_streams():
    stream = Stream.wrap("cpu", 0)
    assert not stream.owned
    assert Stream("cpu").owned
    assert stream == Stream("cpu")
    with pytest.raises(InputError, match="the only handle is 0"):
        Stream.wrap("cpu", 12345)
    with pytest.raises(InputError):
        Stream.wrap("cpu", "12345")
    with pytest.raises(InputError):
        Stream.wrap("cpu", -1)


def test_owner_of_a_foreign_stream_is_kept_and_let_go():
    class Owner:
        def __cuda_stream__(self):
            return (0, 0)

        def __init__(self, gone):
            self.gone = gone

        def __del__(self):
            self.gone.append(True)

    gone = []
    stream = Stream.wrap("cpu", Owner(gone))
    assert gone == []
    del stream
    assert gone == [True]


def test_cpu_stream_is_no_cuda_stream():
    with pytest.raises(UnsupportedOperationError, match="no cudaStream_t"):
        Stream("cpu").__cuda_stream__()


def test_timed_events():
    stream = Stream("cpu")
    start = stream.record(timing=True)
    time.sleep(0.01)
    end = Event("cpu", timing=True)
    end.record(stream)
    assert end.query()
    end.synchronize()
    elapsed = start.elapsed_us(end)
    assert 10_000 <= elapsed < 10_000_000
    assert Event.elapsed_us(start, end) == elapsed
    assert end.elapsed_us(start) == -elapsed


def test_elapsed_needs_timing():
    stream = Stream("cpu")
    timed, plain = stream.record(timing=True), stream.record()
    assert (timed.timing, plain.timing) == (True, False)
    for start, end, which in ((timed, plain, "end"), (plain, timed, "start")):
        with pytest.raises(InputError, match=rf"the {which} event .* create both with timing=True"):
            start.elapsed_us(end)


def test_elapsed_needs_recorded_events():
    stream = Stream("cpu")
    with pytest.raises(InputError, match="record both"):
        stream.record(timing=True).elapsed_us(Event("cpu", timing=True))


def test_graph_on_the_cpu_says_why_not():
    graph = Graph()
    with (
        pytest.raises(UnsupportedOperationError, match=r"nothing to record.*CUDA device"),
        graph.capture(Stream("cpu")),
    ):
        raise AssertionError
    assert not graph.capturing
    assert not graph.captured
    assert not graph.instantiated
    assert graph.node_count == 0
    assert graph.device is None
    assert repr(graph) == "Graph(empty, nodes=0)"


def test_graph_steps_out_of_order():
    graph = Graph()
    with pytest.raises(InputError, match="not being captured"):
        graph.end_capture()
    with pytest.raises(InputError, match="capture some"):
        graph.instantiate()
    with pytest.raises(InputError, match="capture some"):
        graph.replay(Stream("cpu"))
    with pytest.raises(InputError, match="capture some"):
        graph.update(Graph())
    with pytest.raises(InputError, match="itself"):
        graph.update(graph)
    graph.abort_capture()


def test_manager():
    manager = StreamManager.instance()
    assert manager is StreamManager.instance()
    assert manager.default_stream("cpu") == Stream("cpu")
    assert manager.create("cpu").owned
    assert all(manager.pooled("cpu").query() for _ in range(20))
    assert manager.priority_range("cpu") == (0, 0)
    with pytest.raises(InputError, match="out of range"):
        manager.pooled("cpu", priority=-3)


def test_tensor_takes_streams_of_its_device_only():
    class Foreign:
        def __cuda_stream__(self):
            return (0, 0xBEEF)

    tensor = Tensor.empty((2,))
    tensor.record(Stream("cpu"))
    tensor.record_use(Stream("cpu"))
    tensor.make_wait(Stream("cpu"))
    tensor.synchronize()
    with pytest.raises(InputError, match="the only handle is 0"):
        tensor.copy(stream=Foreign())
    with pytest.raises(InputError):
        tensor.record(None)
    with pytest.raises(InputError):
        tensor.copy(stream="fast")
