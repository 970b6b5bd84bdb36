# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The DLPack protocol: versions, capsules, devices, streams, and producers that misbehave."""

import ctypes
import gc
import weakref

import numpy as np
import pytest

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.runtime.stream import Tensor

CPU, CUDA, CUDA_HOST, ROCM = 1, 2, 3, 10
READ_ONLY, IS_COPIED = 1, 2


class DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    """DLManagedTensorVersioned."""


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = [
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("context", ctypes.c_void_p),
    ("deleter", DELETER),
    ("flags", ctypes.c_uint64),
    ("tensor", DLTensor),
]


class LegacyManaged(ctypes.Structure):
    """DLManagedTensor."""


LEGACY_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(LegacyManaged))
LegacyManaged._fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", LEGACY_DELETER)]

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype = ctypes.c_void_p
capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def read(capsule):
    return Managed.from_address(capsule_pointer(capsule, b"dltensor_versioned"))


class Producer:
    """Makes capsules by hand, and counts how often their deleter is called."""

    def __init__(self, legacy=False, name=None, **changes):
        self.data = np.arange(6, dtype=np.float32)
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        self.strides = (ctypes.c_int64 * 2)(3, 1)
        self.deleted = 0
        self.name = name or (b"dltensor" if legacy else b"dltensor_versioned")
        tensor = DLTensor(self.data.ctypes.data, DLDevice(CPU, 0), 2, 2, 32, 1, self.shape, self.strides, 0)
        if legacy:
            self.managed = LegacyManaged(tensor, None, LEGACY_DELETER(self.delete))
        else:
            self.managed = Managed(1, 0, None, DELETER(self.delete), 0, tensor)
        for key, value in changes.items():
            target = self.managed if hasattr(self.managed, key) else self.managed.tensor
            setattr(target, key, value)

    def delete(self, _):
        self.deleted += 1

    def capsule(self):
        return new_capsule(ctypes.addressof(self.managed), self.name, None)


@pytest.mark.parametrize("legacy", [False, True])
def test_deleter_is_called_exactly_once(legacy):
    producer = Producer(legacy)
    tensor = Tensor.from_dlpack(producer.capsule())
    np.testing.assert_array_equal(tensor.numpy(), producer.data.reshape(2, 3))
    twin = Tensor.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert producer.deleted == 0
    del twin
    gc.collect()
    assert producer.deleted == 1


def test_byte_offset_and_missing_strides():
    producer = Producer(byte_offset=8, strides=None, shape=(ctypes.c_int64 * 2)(2, 2))
    tensor = Tensor.from_dlpack(producer.capsule())
    assert tensor.is_contiguous
    np.testing.assert_array_equal(tensor.numpy(), [[2, 3], [4, 5]])


def test_producer_without_a_deleter():
    producer = Producer(deleter=DELETER())
    tensor = Tensor.from_dlpack(producer.capsule())
    assert tensor.numpy()[1, 2] == 5
    del tensor


def test_flag_read_only():
    assert Tensor.from_dlpack(Producer(flags=READ_ONLY).capsule()).readonly
    assert not Tensor.from_dlpack(Producer(flags=IS_COPIED).capsule()).readonly


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"major": 2}, UnsupportedOperationError, r"DLPack 2\.0 cannot be read"),
        ({"lanes": 4}, UnsupportedOperationError, r"code=2, bits=32, lanes=4"),
        ({"code": 17, "bits": 4}, UnsupportedOperationError, "whole bytes"),
        ({"device": DLDevice(ROCM, 0)}, UnsupportedOperationError, r"\(10, 0\)"),
        ({"device": DLDevice(CUDA, -1)}, UnsupportedOperationError, r"\(2, -1\)"),
        ({"ndim": -1}, InputError, "producer is broken"),
        ({"shape": None}, InputError, "producer is broken"),
        ({"data": None}, InputError, "no memory"),
        ({"shape": (ctypes.c_int64 * 2)(2, -3)}, InputError, "negative"),
        ({"shape": (ctypes.c_int64 * 2)(2**40, 2**40)}, InputError, "more elements"),
    ],
)
def test_tensors_that_make_no_sense_are_left_to_their_producer(changes, error, text):
    producer = Producer(**changes)
    capsule = producer.capsule()
    with pytest.raises(error, match=text):
        Tensor.from_dlpack(capsule)
    # Not consumed: its name is still the one of a fresh capsule.
    assert capsule_pointer(capsule, b"dltensor_versioned") == ctypes.addressof(producer.managed)
    assert producer.deleted == 0


def test_capsule_is_consumed_once():
    for capsule in (Tensor.empty((2,)).__dlpack__(), Tensor.empty((2,)).__dlpack__(max_version=(1, 0))):
        Tensor.from_dlpack(capsule)
        with pytest.raises(InputError, match=r"imported already.*call __dlpack__\(\) again"):
            Tensor.from_dlpack(capsule)


def test_capsule_of_another_kind():
    with pytest.raises(InputError, match="'parcel' is no DLPack capsule"):
        Tensor.from_dlpack(Producer(name=b"parcel").capsule())


@pytest.mark.parametrize("array", [None, 3, "text", [1.0], object()])
def test_objects_that_are_no_arrays(array):
    with pytest.raises(InputError, match="is no DLPack array"):
        Tensor.from_dlpack(array)


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3), (9, 0)])
def test_capsule_that_nobody_takes_is_freed(max_version):
    class Array(np.ndarray):
        pass

    array = np.arange(4.0).view(Array)
    alive = weakref.ref(array)
    tensor = Tensor.from_numpy(array)
    capsule = tensor.__dlpack__(max_version=max_version)
    versioned = max_version is not None and max_version[0] >= 1
    assert ("dltensor_versioned" in repr(capsule)) == versioned
    del array, tensor
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_exported_fields():
    array = np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2]
    capsule = Tensor.from_numpy(array).__dlpack__(max_version=(1, 0))
    managed = read(capsule)
    tensor = managed.tensor
    assert (managed.major, managed.flags) == (1, 0)
    assert tensor.data == array.ctypes.data
    assert (tensor.device.type, tensor.device.index) == (CPU, 0)
    assert (tensor.code, tensor.bits, tensor.lanes) == (0, 16, 1)
    assert tensor.ndim == 2
    assert tensor.shape[:2] == [3, 2]
    assert tensor.strides[:2] == [4, 2]
    assert tensor.byte_offset == 0


def test_read_only_needs_the_versioned_protocol():
    array = np.arange(4.0)
    array.flags.writeable = False
    tensor = Tensor.from_numpy(array)
    assert read(tensor.__dlpack__(max_version=(1, 0))).flags == READ_ONLY
    with pytest.raises(UnsupportedOperationError, match=r"max_version=\(1, 0\)"):
        tensor.__dlpack__()
    copied = tensor.__dlpack__(copy=True)
    assert Tensor.from_dlpack(copied).data_ptr != tensor.data_ptr


def test_copy_argument():
    tensor = Tensor.from_numpy(np.arange(6.0)[::2])
    assert read(tensor.__dlpack__(max_version=(1, 0), copy=False)).tensor.data == tensor.data_ptr
    managed = read(capsule := tensor.__dlpack__(max_version=(1, 0), copy=True))
    assert managed.flags == IS_COPIED
    assert managed.tensor.data != tensor.data_ptr
    np.testing.assert_array_equal(Tensor.from_dlpack(capsule).numpy(), [0, 2, 4])
    assert np.from_dlpack(tensor, copy=True).base is not None


def test_device_argument():
    tensor = Tensor.empty((2,))
    assert tensor.__dlpack_device__() == (CPU, 0)
    tensor.__dlpack__(dl_device=(CPU, 0), copy=False)
    tensor.__dlpack__(dl_device=(CUDA_HOST, 0), copy=False)
    np.from_dlpack(tensor, device="cpu")
    with pytest.raises(UnsupportedOperationError, match="copy=False"):
        tensor.__dlpack__(dl_device=(CUDA, 0), copy=False)
    with pytest.raises(UnsupportedOperationError, match=r"\(10, 0\)"):
        tensor.__dlpack__(dl_device=(ROCM, 0))


def test_stream_argument_on_the_cpu():
    tensor = Tensor.empty((2,))
    tensor.__dlpack__(stream=None)
    tensor.__dlpack__(stream=-1)
    with pytest.raises(InputError, match="has no streams"):
        tensor.__dlpack__(stream=1)


def test_arguments_are_checked():
    tensor = Tensor.empty((2,))
    with pytest.raises(TypeError, match="keyword"):
        tensor.__dlpack__(None)
    with pytest.raises(TypeError, match="'streem'"):
        tensor.__dlpack__(streem=1)
    for value in ({"max_version": 1}, {"stream": "x"}, {"dl_device": 3}):
        with pytest.raises((TypeError, RuntimeError, InputError)):
            tensor.__dlpack__(**value)
    with pytest.raises(TypeError):
        Tensor.from_dlpack()
    with pytest.raises(TypeError, match="'streem'"):
        Tensor.from_dlpack(tensor, streem=None)
    assert Tensor.from_dlpack(array=tensor, stream=None).data_ptr == tensor.data_ptr


class OldProducer:
    """A producer from before DLPack 1.0: it does not know max_version."""

    def __init__(self, array):
        self.array = array
        self.calls = 0

    def __dlpack__(self, stream=None):
        self.calls += 1
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_producer_that_does_not_know_versions():
    producer = OldProducer(np.arange(3.0))
    tensor = Tensor.from_dlpack(producer)
    assert tensor.data_ptr == producer.array.ctypes.data
    assert producer.calls == 1


class FailingProducer(OldProducer):
    def __dlpack__(self, **arguments):
        raise BufferError("sold out")


def test_errors_of_the_producer_are_its_own():
    with pytest.raises(BufferError, match="sold out"):
        Tensor.from_dlpack(FailingProducer(np.arange(3.0)))


class CudaProducer(OldProducer):
    def __dlpack_device__(self):
        return (CUDA, 99)


def test_device_that_is_not_there_is_named():
    producer = CudaProducer(np.arange(3.0))
    with pytest.raises(Exception, match=r"cuda:99") as caught:
        Tensor.from_dlpack(producer)
    assert type(caught.value).__name__ in {"CudaError", "UnsupportedOperationError"}
    assert producer.calls == 0


@pytest.mark.torch
def test_torch_both_ways():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64):
        source = torch.ones(2, 3, dtype=dtype)
        tensor = Tensor.from_dlpack(source)
        assert tensor.data_ptr == source.data_ptr()
        assert tensor.dtype == str(dtype).removeprefix("torch.")
        back = torch.from_dlpack(tensor)
        assert back.dtype == dtype
        assert back.data_ptr() == source.data_ptr()
    strided = torch.arange(12).reshape(3, 4).T[1:]
    tensor = Tensor.from_dlpack(strided)
    assert tensor.strides == strided.stride()
    assert torch.equal(torch.from_dlpack(tensor), strided)
    assert Tensor.from_dlpack(torch.empty(0, 4)).shape == (0, 4)
    assert Tensor.from_dlpack(torch.tensor(5)).numpy()[()] == 5


@pytest.mark.torch
def test_torch_tensors_that_cannot_be_shared_say_why():
    torch = pytest.importorskip("torch")
    with pytest.raises(BufferError, match="detach"):
        Tensor.from_dlpack(torch.ones(2, requires_grad=True))
    with pytest.raises(BufferError, match="detach"):
        Tensor.from_dlpack(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(BufferError, match="conjugate"):
        Tensor.from_dlpack(torch.ones(2, dtype=torch.complex64).conj())
    with pytest.raises(BufferError, match="layout"):
        Tensor.from_dlpack(torch.ones(2).to_sparse())
    with pytest.raises((BufferError, ValueError), match="meta"):
        Tensor.from_dlpack(torch.ones(2, device="meta"))
    assert Tensor.from_dlpack(torch.nn.Parameter(torch.ones(2)).detach()).shape == (2,)
