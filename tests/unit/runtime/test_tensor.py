# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tensors on the CPU: their description, copies, and the exchange with NumPy."""

import gc
import sys
import types
import weakref

import numpy as np
import pytest

from xpuruntime.errors import InputError, OutOfMemoryError, UnsupportedOperationError
from xpuruntime.runtime.stream import Stream, Tensor, as_tensor

ml_dtypes = pytest.importorskip("ml_dtypes")

NUMPY_DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
ML_DTYPES = [
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
    "float8_e8m0fnu",
]


class Array(np.ndarray):
    """A NumPy array that can be referred to weakly."""


def watched(array):
    view = array.view(Array)
    return view, weakref.ref(view)


def test_description_of_a_tensor():
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    tensor = Tensor.from_numpy(array)
    assert tensor.shape == (2, 3, 4)
    assert tensor.strides == (12, 4, 1)
    assert (tensor.ndim, tensor.size, tensor.itemsize, tensor.nbytes) == (3, 24, 2, 48)
    assert tensor.dtype == "int16"
    assert tensor.device == "cpu"
    assert tensor.data_ptr == array.ctypes.data
    assert tensor.is_contiguous
    assert not tensor.readonly
    assert not tensor.pinned
    assert tensor.ready_event is None
    assert repr(tensor) == "Tensor(shape=(2, 3, 4), dtype=int16, device=cpu)"
    assert repr(Tensor.empty((3,))) == "Tensor(shape=(3,), dtype=float32, device=cpu)"


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_both_ways_shares_memory(dtype):
    array = np.ones((2, 3), dtype)
    tensor = Tensor.from_numpy(array)
    assert tensor.dtype == dtype
    back = tensor.numpy()
    assert back.dtype == array.dtype
    assert np.shares_memory(array, back)
    back[0, 0] = 0
    assert array[0, 0] == 0
    assert np.shares_memory(array, np.from_dlpack(tensor))
    assert np.shares_memory(array, np.asarray(tensor))


@pytest.mark.parametrize("dtype", ML_DTYPES)
def test_types_of_ml_dtypes_both_ways(dtype):
    array = np.ones((2, 3), getattr(ml_dtypes, dtype))
    tensor = Tensor.from_numpy(array)
    assert tensor.dtype == dtype
    back = tensor.numpy()
    assert back.dtype == array.dtype
    assert np.shares_memory(array.view(np.uint8), back.view(np.uint8))
    assert float(back[1, 2]) == 1.0


def test_bfloat16_without_ml_dtypes_names_the_package(monkeypatch):
    tensor = Tensor.empty((2,), "bfloat16")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedOperationError, match="pip install ml_dtypes"):
        tensor.numpy()


def test_type_that_neither_numpy_nor_ml_dtypes_has(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", types.ModuleType("ml_dtypes"))
    with pytest.raises(UnsupportedOperationError, match=r"no float8_e3m4.*DLPack"):
        Tensor.empty((2,), "float8_e3m4").numpy()


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a[::-1],
        lambda a: a[:, ::-2],
        lambda a: a.T,
        lambda a: a[1:, 2:5],
        lambda a: a[:, :0],
        lambda a: np.broadcast_to(a[0], (3, 8)),
        lambda a: a[2, 3],
        lambda a: a.reshape(1, 4, 1, 8, 1)[:, ::2],
        lambda a: a.reshape(2, 2, 2, 2, 2, 1, 1),
    ],
    ids=["negative", "negative step", "transposed", "slice", "empty", "broadcast", "scalar", "ones", "rank 7"],
)
@pytest.mark.parametrize("through", [Tensor.from_numpy, Tensor.from_dlpack])
def test_layouts_both_ways(make, through):
    array = np.asarray(make(np.arange(32, dtype=np.float32).reshape(4, 8)))
    tensor = through(array)
    assert tensor.shape == array.shape
    assert tensor.is_contiguous == array.flags.c_contiguous
    np.testing.assert_array_equal(tensor.numpy(), array)
    np.testing.assert_array_equal(np.from_dlpack(tensor), array)
    copy = tensor.contiguous()
    assert copy.is_contiguous
    np.testing.assert_array_equal(copy.numpy(), array)
    assert (copy.data_ptr == tensor.data_ptr) == array.flags.c_contiguous


def test_zero_dimensions_and_zero_elements():
    scalar = Tensor.from_numpy(np.array(7.5))
    assert (scalar.shape, scalar.size, scalar.nbytes) == ((), 1, 8)
    assert scalar.numpy()[()] == 7.5
    nothing = Tensor.empty((0, 5), "int32")
    assert (nothing.size, nothing.nbytes, nothing.is_contiguous) == (0, 0, True)
    assert nothing.numpy().shape == (0, 5)
    assert np.from_dlpack(nothing).shape == (0, 5)
    assert Tensor.from_dlpack(nothing).shape == (0, 5)
    assert nothing.copy_(Tensor.empty((0, 5), "int32")) is nothing


def test_read_only_stays_read_only():
    array = np.arange(4.0)
    array.flags.writeable = False
    for tensor in (Tensor.from_numpy(array), Tensor.from_dlpack(array)):
        assert tensor.readonly
        assert "read-only" in repr(tensor)
        assert not tensor.numpy().flags.writeable
        assert not np.from_dlpack(tensor).flags.writeable
        assert Tensor.from_dlpack(tensor).readonly
        with pytest.raises(InputError, match="destination is read-only"):
            tensor.copy_(Tensor.from_numpy(np.zeros(4)))
        assert not tensor.copy().readonly


@pytest.mark.parametrize(
    ("array", "error", "text"),
    [
        (np.array(["a"]), UnsupportedOperationError, "<U1"),
        (np.array([object()]), UnsupportedOperationError, "cannot be shared"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), UnsupportedOperationError, "cannot be shared"),
        (np.zeros(2, ">f4"), UnsupportedOperationError, "byte order"),
        (np.zeros(2, "M8[s]"), UnsupportedOperationError, "cannot be shared"),
        (np.zeros(2, [("a", "i1"), ("b", "f4")])["b"], InputError, "no multiple of the 4 bytes"),
        ([1.0, 2.0], InputError, r"type list.*from_dlpack"),
    ],
)
def test_arrays_that_cannot_be_shared(array, error, text):
    with pytest.raises(error, match=text):
        Tensor.from_numpy(array)


def test_array_lives_as_long_as_its_tensors():
    array, alive = watched(np.arange(6.0))
    tensor = Tensor.from_numpy(array)
    twin = Tensor.from_dlpack(tensor)
    back = twin.numpy()
    del array, tensor, twin
    gc.collect()
    assert alive() is not None
    assert back[5] == 5.0
    del back
    gc.collect()
    assert alive() is None


def test_tensor_memory_outlives_the_tensor_in_numpy():
    tensor = Tensor.empty((1000,), "int64")
    view = tensor.numpy()
    view[:] = np.arange(1000)
    shared = np.from_dlpack(tensor)
    del tensor, view
    gc.collect()
    others = [Tensor.empty((1000,), "int64") for _ in range(8)]
    for other in others:
        other.numpy()[:] = -1
    np.testing.assert_array_equal(shared, np.arange(1000))


def test_array_protocol():
    tensor = Tensor.from_numpy(np.arange(3, dtype=np.float32))
    assert np.shares_memory(np.asarray(tensor), tensor.numpy())
    assert not np.shares_memory(np.array(tensor, copy=True), tensor.numpy())
    assert np.asarray(tensor, dtype=np.float64).dtype == np.float64
    with pytest.raises(UnsupportedOperationError, match="copy=False"):
        tensor.__array__(np.float64, copy=False)
    assert (np.add(tensor, 1) == [1, 2, 3]).all()


def test_copies():
    source = Tensor.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4))
    target = Tensor.empty((3, 4))
    assert target.copy_(source) is target
    np.testing.assert_array_equal(target.numpy(), source.numpy())
    strided = Tensor.from_numpy(np.arange(12, dtype=np.float32).reshape(4, 3).T)
    target.copy_(strided)
    np.testing.assert_array_equal(target.numpy(), strided.numpy())
    twin = source.copy()
    twin.numpy()[:] = 0
    assert source.numpy()[2, 3] == 11
    assert source.to("cpu").data_ptr == source.data_ptr
    assert target.copy_(source, stream=Stream("cpu")) is target


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (np.zeros((3, 4)), "dtypes differ"),
        (np.zeros((4, 3), np.float32), "shapes differ"),
    ],
)
def test_copies_that_do_not_fit(source, text):
    with pytest.raises(InputError, match=text):
        Tensor.empty((3, 4)).copy_(Tensor.from_numpy(source))


def test_copy_to_a_strided_destination_is_refused():
    target = Tensor.from_numpy(np.zeros((4, 3), np.float32).T)
    with pytest.raises(InputError, match="destination is not contiguous"):
        target.copy_(Tensor.empty((3, 4)))


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "text"),
    [
        ((2, -1), "float32", InputError, "dimension -1"),
        ((2,), "float33", InputError, r"'float33' is not known: choose one of .*bfloat16"),
        ((2**40, 2**40), "float32", InputError, "more elements"),
        ((2**62,), "float64", InputError, "more bytes"),
        ((2**45,), "float32", OutOfMemoryError, "cpu"),
    ],
)
def test_empty_that_cannot_be(shape, dtype, error, text):
    with pytest.raises(error, match=text):
        Tensor.empty(shape, dtype)


def test_no_cuda_array_interface_on_the_cpu():
    tensor = Tensor.empty((2,))
    assert not hasattr(tensor, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match=r"\.to\(\"cuda:0\"\)"):
        _ = tensor.__cuda_array_interface__


class FakeCudaArray:
    def __init__(self, **changes):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (2,),
            "typestr": "<f4",
            "data": (4096, False),
            **changes,
        }


@pytest.mark.parametrize(
    ("array", "error", "text"),
    [
        (object(), InputError, "has no __cuda_array_interface__"),
        (FakeCudaArray(typestr=">f4"), UnsupportedOperationError, "byte order"),
        (FakeCudaArray(data=None), InputError, "producer is broken"),
        (FakeCudaArray(shape="ab"), InputError, "producer is broken"),
        (FakeCudaArray(data=(0, False)), InputError, "no memory"),
        (FakeCudaArray(strides=(3,)), InputError, "no multiple of the 4 bytes"),
        (FakeCudaArray(mask=object()), UnsupportedOperationError, "masked"),
        (FakeCudaArray(data=(4096, False)), (InputError, UnsupportedOperationError), "CUDA"),
    ],
)
def test_broken_cuda_arrays(array, error, text):
    with pytest.raises(error, match=text):
        Tensor.from_cuda_array_interface(array)


def test_as_tensor_takes_any_array():
    array = np.arange(3.0)
    tensor = as_tensor(array)
    assert as_tensor(tensor) is tensor
    assert np.shares_memory(tensor.numpy(), array)

    class Producer:
        def __dlpack__(self, **arguments):
            return array.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return array.__dlpack_device__()

    assert as_tensor(Producer()).data_ptr == tensor.data_ptr
    with pytest.raises(InputError, match="type list is no array"):
        as_tensor([1.0])
