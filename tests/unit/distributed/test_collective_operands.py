# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arrays of a collective are checked on this rank, before NCCL sees them."""

from __future__ import annotations

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime._core import ArrayView
from xpuruntime.distributed.collectives import Collectives, _moved_type
from xpuruntime.errors import InputError, UnsupportedOperationError


class Facts:
    """An NCCL of some version, for decisions that need no other."""

    path = "libnccl.so.2"

    def __init__(self, *version: int) -> None:
        self.version = version

    def has(self, *version: int) -> bool:
        return self.version >= version


class Here(Collectives):
    """Rank 1 of 4, with arrays of the CPU, so that all checks run without a GPU; nothing can be launched."""

    rank, world_size, device, _library = 1, 4, "cpu", Facts(2, 28, 9)


x = np.arange(8, dtype=np.float32)


def test_a_view_says_what_an_array_is():
    base = np.arange(24, dtype=np.int16).reshape(4, 6)
    view = ArrayView(base[1:3], "x")
    assert (view.shape, view.dtype, view.device, view.size, view.itemsize) == ((2, 6), "int16", "cpu", 12, 2)
    assert view.data_ptr == base[1:3].ctypes.data
    assert view.is_contiguous
    assert view.current_stream is None
    assert not view.readonly
    assert not ArrayView(base[:, ::2], "x").is_contiguous
    assert not ArrayView(base.T, "x").is_contiguous
    assert ArrayView(base[:, :1][:1], "x").is_contiguous, "a stride that is never used does not count"
    assert ArrayView(base[:0, ::2], "x").is_contiguous
    assert ArrayView(np.array(3, np.float32), "x").shape == ()
    made = view.make_like((5, 2), "out")
    assert isinstance(made, np.ndarray)
    assert (made.shape, made.dtype) == ((5, 2), np.int16)


def test_a_view_keeps_the_array():
    view = ArrayView(np.full(1000, 7, np.int64), "x")
    np.full(1000, 9, np.int64)
    assert view.array[999] == 7
    tensor = ArrayView(xrt.Tensor.from_numpy(np.ones(3)), "x")
    assert (tensor.dtype, tensor.device) == ("float64", "cpu")
    assert isinstance(tensor.make_like((2,), "out"), xrt.Tensor)


@pytest.mark.parametrize("array", [None, 3, "text", [1.0], object()])
def test_what_is_no_array(array: object):
    with pytest.raises((InputError, UnsupportedOperationError), match="x"):
        ArrayView(array, "x")


def test_more_dimensions_than_it_can_say():
    with pytest.raises(InputError, match="9 dimensions, and at most 8"):
        ArrayView(x, "x").make_like((1,) * 9, "out")


def test_a_dtype_that_this_nccl_has_no_name_for_is_moved_as_bytes():
    ml = pytest.importorskip("ml_dtypes")
    assert _moved_type(ArrayView(np.zeros(2, np.int16), "x"), Here._library) == (1, 2)
    assert _moved_type(ArrayView(np.zeros(2, ml.float8_e5m2), "x"), Facts(2, 20, 5)) == (1, 1)


def test_dtypes_that_cannot_be_reduced():
    ml = pytest.importorskip("ml_dtypes")
    with pytest.raises(UnsupportedOperationError, match="op='max' is or, op='min' is and"):
        Here().all_reduce(np.zeros(2, bool))
    with pytest.raises(UnsupportedOperationError, match=r"'x' is int16, which NCCL cannot reduce. Fix: convert"):
        Here().reduce(np.zeros(2, np.int16))
    older = Here()
    older._library = Facts(2, 20, 5)
    with pytest.raises(UnsupportedOperationError, match=r"NCCL has since 2\.24, and libnccl.so.2 is 2\.20\.5"):
        older.reduce_scatter(np.zeros(4, ml.float8_e5m2))


@pytest.mark.torch
def test_a_gradient_that_would_be_lost():
    torch = pytest.importorskip("torch")
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedOperationError, match="requires a gradient, and none is recorded here"):
        Here().all_reduce(leaf)
    with torch.no_grad(), pytest.raises(InputError, match="op is"):
        Here().all_reduce(leaf, "mean")


def test_another_device():
    elsewhere = Here()
    elsewhere.device = "cuda:0"
    with pytest.raises(InputError, match=r"'x' is on cpu, and this communicator is on cuda:0. Fix: move it"):
        elsewhere.all_reduce(x)


def read_only() -> np.ndarray:
    array = np.zeros(8, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda here: here.all_reduce(x, "mean"), "op is 'mean'. Fix: give one of sum, prod, max, min, avg"),
        (lambda here: here.all_reduce(x[::2]), r"'x' \[4\] is not contiguous.*Fix: pass x.contiguous\(\)"),
        (lambda here: here.all_reduce(x, out=np.zeros(8)), "'out' is float64, and the result is float32"),
        (lambda here: here.all_reduce(x, out=read_only()), "'out' is read-only"),
        (lambda here: here.recv(read_only(), 0), "'out' is read-only"),
        (lambda here: here.all_reduce(x[1:], out=x[:7]), "shares memory with 'x' at another place"),
        (lambda here: here.all_gather(x[:2], out=x), "shares memory with 'x' at another place"),
        (lambda here: here.all_reduce(x, out=x.reshape(2, 4)), r"'out' has shape \[2, 4\], and the result has \[8\]"),
        (lambda here: here.reduce(x, root=4), "root is 4. Fix: give a rank from 0 to 3"),
        (lambda here: here.reduce(x, root=0, out=x), "'out' is written on rank 0 only, and this is rank 1"),
        (lambda here: here.broadcast(x, root=True), "root is True"),
        (lambda here: here.send(x, -1), "peer is -1"),
        (lambda here: here.recv(x, 1.0), "peer is 1.0"),
        (lambda here: here.all_gather(x, out=np.zeros((4, 4), np.float32)), r"the result has \[32\] or \[4, 8\]"),
        (lambda here: here.reduce_scatter(x[:6]), r"'x' \[6\] cannot be split over 4 ranks"),
        (lambda here: here.reduce_scatter(np.array(1, np.float32)), "cannot be split"),
        (lambda here: here.reduce_scatter(x, out=x[:2]), "shares memory with 'x' at another place"),
    ],
)
def test_each_operation_refuses_before_anything_is_launched(call, words: str):
    with pytest.raises(InputError, match=words):
        call(Here())
