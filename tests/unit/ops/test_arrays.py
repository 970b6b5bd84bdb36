# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arrays of other libraries in and out of operations, and what is said of those that cannot be shared."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from xpuruntime import InputError, Tensor, UnsupportedOperationError, XpuRuntimeError, ops

F32 = np.float32


def arrays(dtype: Any = F32) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(1)
    a, b = draw.standard_normal((4, 6)).astype(dtype), draw.standard_normal((6, 5)).astype(dtype)
    return a, b, a.astype(np.float64) @ b.astype(np.float64)


class Shared:
    """An array of a library of its own."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        return self.array.__dlpack__(**options)


class Old(Shared):
    """Of a library that knows the first version of the protocol."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()


class Broken(Shared):
    error: BaseException = BufferError("the buffer is gone")

    def __dlpack__(self, **options: Any) -> Any:
        raise self.error


class Elsewhere(Shared):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


KINDS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x,
    "tensor": Tensor.from_numpy,
    "shared": Shared,
    "old": Old,
    "capsule": lambda x: x.__dlpack__(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_array_decides_the_kind(kind: str) -> None:
    a, b, want = arrays()
    out = ops.matmul(KINDS[kind](a), b)
    assert type(out) is (np.ndarray if kind == "numpy" else Tensor)
    np.testing.assert_allclose(np.asarray(out), want, rtol=1e-5)
    assert type(ops.matmul(a, KINDS[kind](b))) is np.ndarray


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_given_to_write_to_comes_back(kind: str) -> None:
    a, b, want = arrays()
    memory = np.full((4, 5), np.nan, F32)
    out = KINDS[kind](memory)
    assert ops.matmul(a, b, out=out) is out
    np.testing.assert_allclose(memory, want, rtol=1e-5)


def test_a_library_with_from_dlpack_gets_its_own_kind() -> None:
    class Imported:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    module = ModuleType("somearrays")
    module.from_dlpack = Imported  # type: ignore[attr-defined]
    kind = type("Array", (Shared,), {"__module__": "somearrays.core"})
    a, b, want = arrays()
    sys.modules["somearrays"] = module
    try:
        out = ops.matmul(kind(a), b)
    finally:
        del sys.modules["somearrays"]
    assert type(out) is Imported
    np.testing.assert_allclose(out.tensor.numpy(), want, rtol=1e-5)


def test_nothing_is_asked_twice_or_kept() -> None:
    a, b, _ = arrays()
    shared = Shared(a)
    gone = weakref.ref(a)
    ops.matmul(shared, b)
    assert len(shared.asked) == 1
    assert shared.asked[0].get("stream") is None
    before = sys.getrefcount(b)
    for _ in range(10):
        ops.matmul(shared, b)
    assert sys.getrefcount(b) == before
    del a, shared
    gc.collect()
    assert gone() is None


def test_subclasses_are_arrays_and_masks_are_not_lost() -> None:
    a, b, want = arrays()

    class Mine(np.ndarray[Any, Any]):
        pass

    assert type(ops.matmul(a.view(Mine), b)) is np.ndarray
    np.testing.assert_allclose(ops.matmul(a.view(Mine), b), want, rtol=1e-5)
    with pytest.raises(InputError, match=r"'b': a masked array, whose mask would be lost: pass its filled"):
        ops.matmul(a, np.ma.masked_less(b, 0))


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(XpuRuntimeError) as caught:
        call()
    assert isinstance(caught.value, InputError | UnsupportedOperationError)
    return str(caught.value)


def frozen(array: Any) -> Any:
    array.setflags(write=False)
    return array


def misaligned(array: Any) -> Any:
    return np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


#: An argument in place of `a` or `out`, and what is said of it.
BAD_INPUTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda a: a.tolist(), "'a': an object of type list is no DLPack array"),
    "number": (lambda a: 3.0, "'a': an object of type float is no DLPack array"),
    "none": (lambda a: None, "the argument 'a' is missing"),
    "vector": (lambda a: a[0], "'a' [6] float32 on cpu has fewer than 2 dimensions"),
    "integers": (lambda a: a.astype(np.int64), "'a' [4, 6] int64 on cpu has a dtype that is not multiplied here"),
    "complex": (lambda a: a.astype(np.complex64), "'a' [4, 6] complex64 on cpu has a dtype"),
    "objects": (lambda a: a.astype(object), "'a': array type '|O' cannot be shared"),
    "other byte order": (lambda a: a.astype(">f4"), "'a': array type '>f4' cannot be shared"),
    "misaligned": (misaligned, "'a' [4, 6] float32 on cpu lies at an address that is no multiple of its 4 bytes"),
    "half strides": (
        lambda a: np.ndarray((4, 6), F32, bytearray(256), 0, (38, 4)),
        "'a': a stride of 38 bytes is no multiple of the 4 bytes of float32: make the array contiguous",
    ),
    "too many dimensions": (lambda a: a.reshape((1,) * 7 + (4, 6)), "'a' has 9 dimensions, and at most 8 are possible"),
    "broken": (Broken, "'a' cannot be shared: BufferError: the buffer is gone"),
}
BAD_OUTPUTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda out: out.tolist(), "'out': an object of type list is no DLPack array"),
    "shape": (lambda out: out.T, "'out' [5, 4] float32 on cpu has the wrong shape: the result is [4, 5]"),
    "dtype": (
        lambda out: out.astype(np.float64),
        "'out' [4, 5] float64 on cpu has the wrong dtype: the result is float32",
    ),
    "read-only": (frozen, "'out' [4, 5] float32 on cpu is read-only"),
    "read-only, by DLPack": (lambda out: Shared(frozen(out)), "'out' [4, 5] float32 on cpu is read-only"),
    "repeated": (
        lambda out: np.lib.stride_tricks.as_strided(out, (4, 5), (4, 0)),
        "'out' [4, 5] float32 on cpu has elements that share memory",
    ),
    "overlapping rows": (
        lambda out: np.lib.stride_tricks.as_strided(out, (4, 5), (12, 4)),
        "'out' [4, 5] float32 on cpu has elements that share memory",
    ),
}


@pytest.mark.parametrize("what", BAD_INPUTS)
def test_inputs_that_are_none(what: str) -> None:
    a, b, want = arrays()
    change, said = BAD_INPUTS[what]
    assert said in refused(lambda: ops.matmul(change(a), b))
    np.testing.assert_allclose(ops.matmul(a, b), want, rtol=1e-5)


@pytest.mark.parametrize("what", BAD_OUTPUTS)
def test_outputs_that_are_none(what: str) -> None:
    a, b, _ = arrays()
    out = np.full((4, 5), 7, F32)
    change, said = BAD_OUTPUTS[what]
    assert said in refused(lambda: ops.matmul(a, b, out=change(out)))
    assert (out == 7).all(), "nothing was written"


def test_a_capsule_can_be_used_once() -> None:
    a, b, want = arrays()
    capsule = a.__dlpack__()
    np.testing.assert_allclose(ops.matmul(capsule, b).numpy(), want, rtol=1e-5)
    assert "'a': this DLPack capsule was imported already, which can be done once" in refused(
        lambda: ops.matmul(capsule, b)
    )
    assert "'b': this DLPack capsule was imported already" in refused(lambda: ops.matmul(a, capsule))


@pytest.mark.parametrize("error", [RuntimeError("deleted"), ValueError("no"), TypeError("odd")], ids=repr)
def test_what_another_library_says_is_passed_on(error: Exception) -> None:
    a, b, _ = arrays()
    broken = Broken(b)
    broken.error = error
    assert f"'b' cannot be shared: {type(error).__name__}: {error}" in refused(lambda: ops.matmul(a, broken))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_is_none_of_ours(error: type[BaseException]) -> None:
    a, b, _ = arrays()
    broken = Broken(b)
    broken.error = error()
    with pytest.raises(error):
        ops.matmul(a, broken)


def test_another_device_is_named() -> None:
    import xpuruntime as xrt

    if xrt.get_device_count("cuda"):
        pytest.skip("there is a CUDA device")
    a, b, _ = arrays()
    with pytest.raises(xrt.CudaError, match=r"'b'.*'cuda:0' does not exist"):
        ops.matmul(a, Elsewhere(b))


def test_streams_on_the_cpu() -> None:
    a, b, _ = arrays()
    ops.matmul(a, b, stream=None)
    assert "stream" in refused(lambda: ops.matmul(a, b, stream="fast"))
    assert "stream handle 7" in refused(lambda: ops.matmul(a, b, stream=7))


# --- PyTorch on the CPU ----------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        a, b = torch.randn(4, 6).to(dtype), torch.randn(6, 5).to(dtype)
        out = ops.matmul(a, b)
        assert (type(out), out.dtype) == (torch.Tensor, dtype)
        torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=2e-2, atol=2e-2)
        given = torch.full((5, 4), torch.nan, dtype=dtype).T
        assert ops.matmul(a, b, out=given) is given
        assert torch.equal(given, out)


@pytest.mark.torch
def test_torch_mixed_with_others() -> None:
    torch = pytest.importorskip("torch")
    a, b, want = arrays()
    for left, right, kind in (
        (torch.from_numpy(a), b, torch.Tensor),
        (a, torch.from_numpy(b), np.ndarray),
        (Tensor.from_numpy(a), torch.from_numpy(b), Tensor),
    ):
        out = ops.matmul(left, right)
        assert type(out) is kind
        np.testing.assert_allclose(np.asarray(out), want, rtol=1e-5)


@pytest.mark.torch
def test_gradients_are_not_lost_silently() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, 5)
    said = refused(lambda: ops.matmul(a, b))
    assert "'a' requires a gradient" in said
    assert "torch.no_grad()" in said
    assert "a.detach()" in said
    assert "'b' requires a gradient" in refused(lambda: ops.matmul(b.T, a.T))
    assert "'out' requires" in refused(lambda: ops.matmul(b.T, b, out=torch.empty(5, 5, requires_grad=True)))
    want = a.detach() @ b
    with torch.no_grad():
        torch.testing.assert_close(ops.matmul(a, b), want)
    with torch.inference_mode():
        torch.testing.assert_close(ops.matmul(a, b), want)
    torch.testing.assert_close(ops.matmul(a.detach(), b), want)
    assert "'a' requires a gradient" in refused(lambda: ops.matmul(torch.nn.Parameter(b), b.T))


@pytest.mark.torch
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (1, 1)])
def test_a_minus_is_not_lost_silently(shape: tuple[int, int], dense: bool) -> None:
    torch = pytest.importorskip("torch")
    a = torch.randn(shape, dtype=torch.complex64).conj().imag
    a = a.as_strided(shape, (shape[1], 1)) if dense else a
    assert a.is_neg()
    b = torch.randn(shape)
    for wrong in (lambda: ops.matmul(a, b), lambda: ops.matmul(b, a), lambda: ops.matmul(b, b, out=a)):
        said = refused(wrong)
        assert "has yet to be negated" in said
        assert "resolve_neg()" in said
    with pytest.raises(UnsupportedOperationError, match=r"this Tensor has yet to be negated.*resolve_neg"):
        Tensor.from_dlpack(a)
    torch.testing.assert_close(ops.matmul(a.resolve_neg(), b), a @ b)
    part = torch.randn(shape, dtype=torch.complex64).imag  # not dense, and nothing to negate
    torch.testing.assert_close(ops.matmul(part, b), part @ b)


@pytest.mark.torch
def test_torch_tensors_that_cannot_be_shared() -> None:
    torch = pytest.importorskip("torch")
    b = torch.ones(6, 5)
    for bad in (torch.ones(4, 6).to_sparse(), torch.ones(4, 6, device="meta"), torch.ones(4, 6, dtype=torch.complex64)):
        assert "'a'" in refused(lambda bad=bad: ops.matmul(bad, b))


@pytest.mark.torch
def test_views_of_torch_and_channels_last() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 6, 5, 7).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(4, 6, 3, 3)
    out = ops.conv2d(x, weight)
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, weight), rtol=1e-4, atol=1e-4)
    a = torch.randn(3, 6, 4).transpose(1, 2)
    torch.testing.assert_close(ops.matmul(a, torch.randn(5, 6).T.contiguous()).shape, torch.Size([3, 4, 5]))
