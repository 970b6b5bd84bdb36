# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tensors on a CUDA device: shared with PyTorch and CuPy, copied to and from the host, refused where they must be."""

from __future__ import annotations

import gc
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch_work import keep_busy, on, warm_up

from xpuruntime.errors import CudaError, InputError, OutOfMemoryError, UnsupportedOperationError
from xpuruntime.runtime.memory import MemoryPool
from xpuruntime.runtime.stream import Stream, Tensor, as_tensor

CPU, CUDA, CUDA_HOST = 1, 2, 3
COUNT = 1 << 16
TORCH_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    warm_up()


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_both_ways_shares_memory(dtype: torch.dtype) -> None:
    source = torch.ones(3, 5, dtype=dtype, device="cuda")
    tensor = Tensor.from_dlpack(source)
    assert tensor.data_ptr == source.data_ptr()
    assert (tensor.device, tensor.shape) == ("cuda:0", (3, 5))
    assert tensor.dtype == str(dtype).removeprefix("torch.")
    back = torch.from_dlpack(tensor)
    assert back.data_ptr() == source.data_ptr()
    assert (back.dtype, back.device, back.shape) == (dtype, source.device, source.shape)
    back.zero_()
    assert not source.any().item()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.T,
        lambda x: x[1:, 2:5],
        lambda x: x[:, ::2],
        lambda x: x[:, :0],
        lambda x: x[2, 3],
        lambda x: x[0].expand(4, 8),
        lambda x: x.reshape(2, 2, 2, 2, 2, 1, 1),
    ],
    ids=["transposed", "slice", "step", "empty", "scalar", "expanded", "rank 7"],
)
def test_layouts(make: Any) -> None:
    source = make(torch.arange(32, dtype=torch.float32, device="cuda").reshape(4, 8))
    tensor = Tensor.from_dlpack(source)
    assert tensor.shape == tuple(source.shape)
    assert tensor.is_contiguous == source.is_contiguous()
    assert torch.equal(torch.from_dlpack(tensor), source)
    flat = tensor.contiguous()
    assert flat.is_contiguous
    np.testing.assert_array_equal(flat.to("cpu").numpy(), source.cpu().numpy())
    if tensor.is_contiguous:
        assert flat.data_ptr == tensor.data_ptr
    else:
        with pytest.raises(InputError, match=r"not contiguous.*call contiguous\(\) first"):
            tensor.to("cpu")


def test_cupy_both_ways_shares_memory() -> None:
    cupy = pytest.importorskip("cupy")
    source = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)[:, 1:]
    for tensor in (Tensor.from_dlpack(source), Tensor.from_cuda_array_interface(source), as_tensor(source)):
        assert tensor.data_ptr == source.data.ptr
        assert tensor.shape == (3, 3)
        assert tensor.strides == (4, 1)
        for back in (cupy.from_dlpack(tensor), cupy.asarray(tensor)):
            assert back.data.ptr == source.data.ptr
            cupy.testing.assert_array_equal(back, source)
    source += 1
    np.testing.assert_array_equal(tensor.contiguous().to("cpu").numpy(), [[2, 3, 4], [6, 7, 8], [10, 11, 12]])


def test_cuda_array_interface() -> None:
    stream = Stream("cuda:0")
    tensor = Tensor.empty((2, 3), "int32", "cuda:0", stream=stream)
    entries = tensor.__cuda_array_interface__
    assert entries == {
        "version": 3,
        "shape": (2, 3),
        "typestr": "<i4",
        "data": (tensor.data_ptr, False),
        "strides": None,
        "stream": stream.handle,
    }
    assert torch.as_tensor(tensor, device="cuda").data_ptr() == tensor.data_ptr
    on_default = Tensor.empty((2,), device="cuda:0")
    assert on_default.__cuda_array_interface__["stream"] == 1, "the legacy default stream is 1 there, never 0"
    strided = Tensor.from_dlpack(torch.zeros(4, 6, device="cuda").T)
    assert strided.__cuda_array_interface__["strides"] == (4, 24)
    with pytest.raises(AttributeError, match=r"bfloat16.*DLPack"):
        _ = Tensor.empty((2,), "bfloat16", "cuda:0").__cuda_array_interface__


class Interface:
    """An array with any stated attributes."""

    def __init__(self, source: torch.Tensor, **changes: Any) -> None:
        self.source = source
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(source.shape),
            "typestr": "<f4",
            "data": (source.data_ptr(), False),
            **changes,
        }


def test_cuda_array_interface_of_others() -> None:
    source = torch.arange(8, dtype=torch.float32, device="cuda")
    readonly = Tensor.from_cuda_array_interface(Interface(source, data=(source.data_ptr(), True)))
    assert readonly.readonly
    assert readonly.__cuda_array_interface__["data"] == (source.data_ptr(), True)
    with pytest.raises(InputError, match="destination is read-only"):
        readonly.copy_(Tensor.empty((8,), device="cuda:0"))
    every_other = Tensor.from_cuda_array_interface(Interface(source, shape=(4,), strides=(8,)))
    np.testing.assert_array_equal(every_other.contiguous().to("cpu").numpy(), [0, 2, 4, 6])
    with pytest.raises(InputError, match="stream=0"):
        Tensor.from_cuda_array_interface(Interface(source, stream=0))
    with pytest.raises(InputError, match="not in the memory of a CUDA device"):
        Tensor.from_cuda_array_interface(Interface(torch.zeros(2)))
    assert torch.ones(2, device="cuda").sum().item() == 2.0, "an error stayed behind in CUDA"


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (17, 31), (1, 2, 1, 3, 1, 4, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bool", "int64", "complex128", "bfloat16", "float8_e4m3fn"])
def test_host_to_device_and_back(shape: tuple[int, ...], dtype: str) -> None:
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    source = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(numpy_dtype)
    on_device = Tensor.from_numpy(source).to("cuda:0")
    assert (on_device.device, on_device.dtype, on_device.shape) == ("cuda:0", dtype, shape)
    assert on_device.to("cuda:0").data_ptr == on_device.data_ptr
    back = on_device.to("cpu").numpy()
    assert back.dtype == numpy_dtype
    np.testing.assert_array_equal(
        back.view(np.uint8) if back.ndim else back, source.view(np.uint8) if back.ndim else source
    )
    twin = on_device.copy()
    assert twin.nbytes == source.nbytes
    if twin.nbytes:
        assert twin.data_ptr != on_device.data_ptr


def test_host_cannot_read_device_memory() -> None:
    tensor = Tensor.empty((4,), device="cuda:0")
    for read in (tensor.numpy, lambda: np.asarray(tensor)):
        with pytest.raises(UnsupportedOperationError, match=r"on a device: copy it with \.to\(\"cpu\"\)"):
            read()
    with pytest.raises(UnsupportedOperationError, match="copy=False"):
        tensor.__dlpack__(dl_device=(CPU, 0), copy=False)


def test_dlpack_copies_across_when_asked() -> None:
    stream = Stream("cuda:0")
    tensor = Tensor.empty((COUNT,), device="cuda:0", stream=stream)
    keep_busy(stream)
    with on(stream):
        torch.from_dlpack(tensor).fill_(4.0)
    tensor.record(stream)
    capsule = tensor.__dlpack__(max_version=(1, 0), dl_device=(CPU, 0))
    on_host = Tensor.from_dlpack(capsule)
    assert on_host.device == "cpu"
    assert set(on_host.numpy().tolist()) == {4.0}, "the copy did not wait for the tensor"
    there = on_host.__dlpack__(max_version=(1, 0), dl_device=(CUDA, 0), stream=1)
    assert set(Tensor.from_dlpack(there).to("cpu").numpy().tolist()) == {4.0}
    inside = Tensor.from_dlpack(tensor.__dlpack__(max_version=(1, 0), copy=True))
    assert inside.device == "cuda:0"
    assert inside.data_ptr != tensor.data_ptr
    assert set(inside.to("cpu").numpy().tolist()) == {4.0}


def test_dlpack_device_and_stream_numbers() -> None:
    tensor = Tensor.empty((2,), device="cuda:0")
    assert tensor.__dlpack_device__() == (CUDA, 0)
    theirs = torch.cuda.Stream()
    for stream in (None, 1, 2, -1, theirs.cuda_stream):
        tensor.__dlpack__(stream=stream)
    for stream in (0, -2):
        with pytest.raises(InputError, match=rf"stream={stream} has no meaning"):
            tensor.__dlpack__(stream=stream)


def test_device_that_is_not_there() -> None:
    for make in (
        lambda: Tensor.empty((2,), device="cuda:99"),
        lambda: Tensor.empty((2,)).to("cuda:99"),
        lambda: Tensor.empty((2,)).__dlpack__(dl_device=(CUDA, 99), max_version=(1, 0)),
    ):
        with pytest.raises(CudaError, match="cuda:99"):
            make()


def test_streams_of_the_wrong_device() -> None:
    tensor = Tensor.empty((2,), device="cuda:0")
    cpu = Stream("cpu")
    for act in (
        lambda: tensor.copy(stream=cpu),
        lambda: tensor.to("cpu", stream=cpu),
        lambda: Tensor.empty((2,), device="cuda:0", stream=cpu),
        lambda: Tensor.from_dlpack(torch.zeros(2, device="cuda"), cpu),
        lambda: tensor.order_on(cpu),
    ):
        with pytest.raises(InputError, match=r"done by cuda:0.*stream is one of cpu: pass a stream of cuda:0"):
            act()
    with pytest.raises(InputError, match="it cannot hold a tensor on cpu"):
        Tensor.empty((2,), device="cpu", pool=MemoryPool("cuda:0"))


def test_current_device_is_restored() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.set_device(index)
        for other in range(torch.cuda.device_count()):
            tensor = Tensor.from_numpy(np.arange(5.0)).to(f"cuda:{other}")
            assert tensor.copy().to("cpu").numpy()[4] == 4.0
            if other != index:
                across = tensor.to(f"cuda:{index}")
                assert across.to("cpu").numpy()[3] == 3.0
            del tensor
            assert torch.cuda.current_device() == index, f"work on cuda:{other} left another current device"
    torch.cuda.set_device(0)


def test_out_of_memory_is_a_memory_error_and_leaves_the_session_working() -> None:
    with pytest.raises(OutOfMemoryError, match="cuda:0") as caught:
        Tensor.empty((2**44,), "float32", "cuda:0")
    assert isinstance(caught.value, MemoryError)
    assert Tensor.from_numpy(np.ones(3)).to("cuda:0").to("cpu").numpy().sum() == 3.0
    assert torch.ones(2, device="cuda").sum().item() == 2.0, "an error stayed behind in CUDA"


def test_torch_memory_lives_as_long_as_the_tensor() -> None:
    source = torch.full((COUNT,), 3.0, device="cuda")
    tensor = Tensor.from_dlpack(source)
    del source
    gc.collect()
    torch.cuda.empty_cache()
    fill = [torch.full((COUNT,), -1.0, device="cuda") for _ in range(16)]
    assert len(fill) == 16
    assert set(tensor.to("cpu").numpy().tolist()) == {3.0}


def test_our_memory_lives_as_long_as_torchs_tensor() -> None:
    tensor = Tensor.from_numpy(np.full(COUNT, 3.0, np.float32)).to("cuda:0")
    theirs = torch.from_dlpack(tensor)
    del tensor
    gc.collect()
    fill = [Tensor.from_numpy(np.full(COUNT, -1.0, np.float32)).to("cuda:0") for _ in range(16)]
    assert len(fill) == 16
    assert set(theirs.tolist()) == {3.0}


def test_torch_tensors_that_cannot_be_shared_say_why() -> None:
    with pytest.raises(BufferError, match="detach"):
        Tensor.from_dlpack(torch.ones(2, device="cuda", requires_grad=True))
    with pytest.raises(BufferError, match="conjugate"):
        Tensor.from_dlpack(torch.ones(2, dtype=torch.complex64, device="cuda").conj())


def test_pinned_memory() -> None:
    stream = Stream("cuda:0")
    pool = MemoryPool("cuda:0", "pinned")
    staging = Tensor.empty((COUNT,), device="cpu", pool=pool)
    assert staging.pinned
    assert staging.device == "cpu"
    assert staging.__dlpack_device__() == (CUDA_HOST, 0)
    staging.numpy()[:] = 1.0
    source = Tensor.from_numpy(np.full(COUNT, 2.0, np.float32)).to("cuda:0", stream=stream)
    stream.synchronize()
    keep_busy(stream)
    staging.copy_(source, stream=stream)
    assert not stream.query(), "a copy to pinned memory blocked the host"
    with pytest.raises(UnsupportedOperationError, match=r"still on its way: call synchronize\(\)"):
        staging.numpy()
    with pytest.raises(UnsupportedOperationError, match="still on its way"):
        staging.__dlpack__()
    staging.synchronize()
    assert set(staging.numpy().tolist()) == {2.0}
    assert np.shares_memory(np.from_dlpack(staging), staging.numpy())


def test_sixteen_threads_copy_back_and_forth() -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            stream = Stream("cuda:0")
            for turn in range(20):
                value = float(number * 100 + turn)
                there = Tensor.from_numpy(np.full(COUNT, value, np.float32)).to("cuda:0", stream=stream)
                seen = set(torch.from_dlpack(there.copy(stream=stream)).cpu().tolist())
                back = set(there.to("cpu", stream=stream).numpy().tolist())
                if seen != {value} or back != {value}:
                    failures.append(f"thread {number}, turn {turn}: expected {value}, read {seen} and {back}")
        except Exception as error:
            failures.append(f"thread {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
