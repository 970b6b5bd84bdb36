# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The order of work on shared memory: each exchange waits on the device, never on the host.

In every test one stream runs a kernel of a tenth of a second and then writes; another reads. What it reads says whether
it waited; whether the first stream is still busy afterwards says whether the host did.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch_work import keep_busy, on, warm_up

from xpuruntime.runtime.memory import MemoryPool
from xpuruntime.runtime.stream import Stream, Tensor

COUNT = 1 << 16
OLD, NEW = 0.0, 1.0


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


def written_late(stream: Stream) -> Tensor:
    """Return a tensor that holds OLD until the long kernel on `stream` is done, and NEW after."""
    tensor = Tensor.empty((COUNT,), device="cuda:0", stream=stream)
    with on(stream):
        view = torch.from_dlpack(tensor)
        view.fill_(OLD)
        stream.synchronize()
        torch.cuda._sleep(200_000_000)
        view.fill_(NEW)
    tensor.record(stream)
    return tensor


def torch_written_late(stream: torch.cuda.Stream) -> torch.Tensor:
    tensor = full(OLD)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(NEW)
    return tensor


def test_export_to_torch_waits_on_the_device() -> None:
    producer, consumer = Stream("cuda:0"), torch.cuda.Stream()
    target, tensor = full(-1.0), written_late(producer)
    with torch.cuda.stream(consumer):
        target.copy_(torch.from_dlpack(tensor))
    assert not producer.query(), "__dlpack__ waited on the host"
    assert values(target) == {NEW}, "torch's stream did not wait for ours"


def test_export_without_ordering_really_reads_too_early() -> None:
    producer, consumer = Stream("cuda:0"), torch.cuda.Stream()
    target, tensor = full(-1.0), written_late(producer)
    view = torch.utils.dlpack.from_dlpack(tensor.__dlpack__(stream=-1))
    with torch.cuda.stream(consumer):
        target.copy_(view)
    assert values(target) == {OLD}, "stream=-1 ordered the streams all the same, or the kernel was too short"


@pytest.mark.parametrize("number", [None, 1])
def test_export_to_the_legacy_default_stream(number: int | None) -> None:
    producer = Stream("cuda:0")
    target, tensor = full(-1.0), written_late(producer)
    view = torch.utils.dlpack.from_dlpack(tensor.__dlpack__(stream=number))
    target.copy_(view)
    assert not producer.query(), "__dlpack__ waited on the host"
    assert values(target) == {NEW}


def test_ready_event() -> None:
    producer = Stream("cuda:0")
    tensor = written_late(producer)
    event = tensor.ready_event
    assert event is not None
    assert not event.query()
    keep_busy(producer)
    tensor.synchronize()
    assert event.query()
    assert not producer.query(), "the tensor waited for work that has nothing to do with it"


class ByProtocol:
    """An array that has __dlpack__ and nothing faster."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self.array.__dlpack_device__()
        return (int(device[0]), int(device[1]))


@pytest.mark.parametrize("wrap", [lambda x: x, ByProtocol], ids=["C table", "protocol"])
def test_import_from_torch_waits_on_the_device(wrap: Any) -> None:
    producer, consumer = torch.cuda.Stream(), Stream("cuda:0")
    source, target = torch_written_late(producer), Tensor.empty((COUNT,), device="cuda:0", stream=consumer)
    with torch.cuda.stream(producer):
        tensor = Tensor.from_dlpack(wrap(source), consumer)
    target.copy_(tensor, stream=consumer)
    assert not producer.query(), "from_dlpack waited on the host"
    assert set(target.to("cpu", stream=consumer).numpy().tolist()) == {NEW}, "our stream did not wait for torch's"


def test_import_without_a_stream_keeps_torchs_current_one() -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return  # This PyTorch does not say what its current stream is; then the legacy default stream is meant.
    producer, consumer = torch.cuda.Stream(), Stream("cuda:0")
    source = torch_written_late(producer)
    with torch.cuda.stream(producer):
        tensor = Tensor.from_dlpack(source)
    copy = tensor.copy(stream=consumer)
    assert not producer.query(), "the host waited"
    assert set(copy.to("cpu", stream=consumer).numpy().tolist()) == {NEW}


def test_import_from_cupy_waits_on_the_device() -> None:
    cupy = pytest.importorskip("cupy")
    producer, consumer = torch.cuda.Stream(), Stream("cuda:0")
    source = torch_written_late(producer)
    with cupy.cuda.Stream.from_external(producer):
        theirs = cupy.from_dlpack(source.detach())
        for tensor in (
            Tensor.from_dlpack(theirs, consumer),
            Tensor.from_cuda_array_interface(theirs, stream=consumer),
        ):
            copy = tensor.copy(stream=consumer)
            assert set(copy.to("cpu", stream=consumer).numpy().tolist()) == {NEW}


class Interface:
    def __init__(self, source: torch.Tensor, stream: int | None) -> None:
        self.source = source
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(source.shape),
            "typestr": "<f4",
            "data": (source.data_ptr(), False),
            "stream": stream,
        }


@pytest.mark.parametrize("given", [True, False], ids=["with a stream", "without"])
def test_import_by_the_cuda_array_interface_waits_on_the_device(given: bool) -> None:
    producer, consumer = torch.cuda.Stream(), Stream("cuda:0")
    source = torch_written_late(producer)
    array = Interface(source, producer.cuda_stream)
    tensor = Tensor.from_cuda_array_interface(array, stream=consumer if given else None)
    copy = tensor.copy(stream=consumer)
    assert not producer.query(), "the host waited"
    assert set(copy.to("cpu", stream=consumer).numpy().tolist()) == {NEW}


def test_import_by_the_cuda_array_interface_without_a_stream_reads_at_once() -> None:
    producer, consumer = torch.cuda.Stream(), Stream("cuda:0")
    source = torch_written_late(producer)
    copy = Tensor.from_cuda_array_interface(Interface(source, None)).copy(stream=consumer)
    consumer.synchronize()
    assert not producer.query()
    assert set(copy.to("cpu", stream=consumer).numpy().tolist()) == {OLD}, "stream None asks for no ordering"


def test_copies_order_themselves() -> None:
    first, second, third = (Stream("cuda:0") for _ in range(3))
    tensor = written_late(first)
    middle = tensor.copy(stream=second)
    last = Tensor.empty((COUNT,), device="cuda:0", stream=third).copy_(middle, stream=third)
    assert not first.query(), "a copy waited on the host"
    assert set(last.to("cpu").numpy().tolist()) == {NEW}, "a chain of copies on three streams lost its order"


def test_overwriting_waits_for_what_was_written_before() -> None:
    first, second = Stream("cuda:0"), Stream("cuda:0")
    fresh = Tensor.from_dlpack(full(9.0), second)
    tensor = written_late(first)
    tensor.copy_(fresh, stream=second)
    assert not first.query(), "the host waited"
    assert values(torch.from_dlpack(tensor)) == {9.0}, "the older write came last"


@pytest.mark.parametrize("kind", ["caching", "driver", "direct"])
def test_memory_is_not_reused_under_a_copy_that_still_reads_it(kind: str) -> None:
    home, reader = Stream("cuda:0"), Stream("cuda:0")
    pool = MemoryPool("cuda:0", kind)
    source = Tensor.empty((COUNT,), device="cuda:0", pool=pool, stream=home)
    with on(home):
        torch.from_dlpack(source).fill_(NEW)
    source.record(home)
    target = Tensor.empty((COUNT,), device="cuda:0", stream=reader)
    keep_busy(reader)
    target.copy_(source, stream=reader)
    address = source.data_ptr
    del source
    gc.collect()
    others = [Tensor.empty((COUNT,), device="cuda:0", pool=pool, stream=home) for _ in range(4)]
    for other in others:
        with on(home):
            torch.from_dlpack(other).fill_(-7.0)
    seen = set(target.to("cpu", stream=reader).numpy().tolist())
    assert seen == {NEW}, f"the {kind} pool gave {address:#x} away too early: the copy read {seen}"


def test_record_use_holds_memory_back_for_a_foreign_stream() -> None:
    home, reader = Stream("cuda:0"), torch.cuda.Stream()
    pool = MemoryPool("cuda:0", "caching")
    source = Tensor.empty((COUNT,), device="cuda:0", pool=pool, stream=home)
    with on(home):
        torch.from_dlpack(source).fill_(NEW)
    source.record(home)
    target = full(-1.0)
    with torch.cuda.stream(reader):
        torch.cuda._sleep(200_000_000)
        target.copy_(torch.from_dlpack(source))
    source.record_use(reader)
    del source
    gc.collect()
    for _ in range(4):
        other = Tensor.empty((COUNT,), device="cuda:0", pool=pool, stream=home)
        with on(home):
            torch.from_dlpack(other).fill_(-7.0)
    assert values(target) == {NEW}


def test_make_wait_orders_a_foreign_stream() -> None:
    producer, consumer = Stream("cuda:0"), torch.cuda.Stream()
    target, tensor = full(-1.0), written_late(producer)
    view = torch.utils.dlpack.from_dlpack(tensor.__dlpack__(stream=-1))
    tensor.make_wait(consumer)
    with torch.cuda.stream(consumer):
        target.copy_(view)
    assert not producer.query(), "make_wait waited on the host"
    assert values(target) == {NEW}
