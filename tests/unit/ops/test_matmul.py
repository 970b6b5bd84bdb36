# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`xpuruntime.ops.matmul` on the CPU: shapes, views, results, and calls that make no sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from recording_kernel import Recorder

import xpuruntime as xrt
from xpuruntime import InputError, UnsupportedOperationError, _core, ops

F32 = np.float32
DRAW = np.random.default_rng(3)
#: Why no kernel of cuBLAS serves arrays on the CPU, by what was built.
NO_CUBLAS = _core.why_not_built("cublas") or "serves cuda, and the operands are on cpu"


def randn(*shape: int, dtype: Any = F32) -> Any:
    return DRAW.standard_normal(shape).astype(dtype)


def check(a: Any, b: Any, **options: Any) -> None:
    out = ops.matmul(a, b, **options)
    want = np.matmul(a.astype(np.float64), b.astype(np.float64))
    assert out.shape == want.shape
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("m", [0, 1, 17])
@pytest.mark.parametrize("n", [0, 1, 13])
@pytest.mark.parametrize("k", [0, 1, 9])
def test_sizes(m: int, n: int, k: int) -> None:
    check(randn(m, k), randn(k, n))
    check(randn(2, m, k), randn(2, k, n))
    bias = randn(n)
    out = ops.matmul(randn(m, k), np.zeros((k, n), F32), bias, "relu")
    np.testing.assert_array_equal(out, np.broadcast_to(np.maximum(bias, 0), (m, n)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 4, 5), (2, 3, 5, 6)),
        ((2, 3, 4, 5), (5, 6)),
        ((4, 5), (2, 3, 5, 6)),
        ((1, 4, 5), (3, 5, 6)),
        ((3, 4, 5), (1, 5, 6)),
        ((3, 4, 5), (1, 1, 5, 6)),
        ((1, 1, 1, 4, 5), (2, 3, 5, 6)),
        ((0, 4, 5), (0, 5, 6)),
        ((0, 4, 5), (5, 6)),
        ((2, 1, 2, 1, 2, 1, 4, 5), (2, 1, 2, 1, 2, 1, 5, 6)),
    ],
)
def test_batches(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check(randn(*a), randn(*b))


def test_batches_that_would_be_repeated_in_part_are_refused() -> None:
    with pytest.raises(InputError, match=r"'b' \[3, 5, 6\].*repeated along some of its batch dimensions"):
        ops.matmul(randn(2, 3, 4, 5), randn(3, 5, 6))
    with pytest.raises(InputError, match=r"'a'.* and 'b'.*batch dimensions that do not broadcast"):
        ops.matmul(randn(2, 4, 5), randn(3, 5, 6))


def test_rows_and_columns_of_a_vector() -> None:
    with pytest.raises(InputError, match=r"'b' \[5\].*fewer than 2 dimensions.*reshape it"):
        ops.matmul(randn(4, 5), randn(5))


# --- views -----------------------------------------------------------------------------------------------------------


def seen(recorder: Callable[[str], Recorder], a: Any, b: Any, **options: Any) -> dict[str, Any]:
    """What a kernel is given: shape, strides and the distance of its memory from the argument's."""
    kernel = recorder("matmul")
    ops.matmul(a, b, kernel=kernel.id, **options)
    arguments = {"a": a, "b": b, **{name: x for name, x in options.items() if x is not None}}
    return {
        name: (shape, strides, pointer - arguments[name].ctypes.data if name in arguments else None)
        for name, (shape, strides, pointer) in kernel.seen.items()
    }


def test_transposed_views_are_not_copied(recorder: Callable[[str], Recorder]) -> None:
    found = seen(recorder, randn(5, 4).T, randn(6, 5).T)
    assert found == {"a": ((4, 5), (1, 4), 0), "b": ((5, 6), (1, 5), 0), "out": ((4, 6), (6, 1), None)}


def test_parts_of_larger_arrays_are_not_copied(recorder: Callable[[str], Recorder]) -> None:
    out = np.zeros((9, 20), F32)[1:5, 3:9]
    found = seen(recorder, randn(9, 11)[2:6, 3:8], randn(5, 40)[:, 7:13], out=out)
    assert found == {"a": ((4, 5), (11, 1), 0), "b": ((5, 6), (40, 1), 0), "out": ((4, 6), (20, 1), 0)}


def test_backwards_and_apart_are_not_copied(recorder: Callable[[str], Recorder]) -> None:
    found = seen(recorder, randn(4, 5)[::-1], randn(10, 12)[::2, ::-2])
    assert found["a"] == ((4, 5), (-5, 1), 0)
    assert found["b"] == ((5, 6), (24, -2), 0)


def test_batches_of_one_matrix_become_rows(recorder: Callable[[str], Recorder]) -> None:
    found = seen(recorder, randn(2, 3, 4, 5), randn(5, 6), bias=randn(6))
    assert found["a"] == ((24, 5), (5, 1), 0)
    assert found["out"][:2] == ((24, 6), (6, 1))
    assert found["bias"] == ((6,), (1,), 0)


def test_rows_that_do_not_join_stay_a_batch(recorder: Callable[[str], Recorder]) -> None:
    found = seen(recorder, randn(3, 8, 5)[:, :4], randn(5, 6))
    assert found["a"] == ((3, 4, 5), (40, 5, 1), 0)
    assert found["b"] == ((5, 6), (6, 1), 0)
    assert found["out"][:2] == ((3, 4, 6), (24, 6, 1))


def test_a_repeated_batch_has_no_stride(recorder: Callable[[str], Recorder]) -> None:
    found = seen(recorder, np.broadcast_to(randn(4, 5), (3, 4, 5)), randn(3, 5, 6))
    assert found["a"] == ((3, 4, 5), (0, 5, 1), 0)


def test_a_dimension_of_one_has_the_stride_of_a_plain_array(recorder: Callable[[str], Recorder]) -> None:
    """So that equal work is described equally."""
    odd = np.lib.stride_tricks.as_strided(randn(5), (1, 5), (400, 4))
    kernel = recorder("matmul")
    ops.matmul(odd, randn(5, 6), kernel=kernel.id)
    assert kernel.described["operands"]["a"]["strides"] == (5, 1)
    before = len(xrt.decisions())
    ops.matmul(randn(1, 5), randn(5, 6), kernel=kernel.id)
    after = xrt.decisions()
    assert len(after) == before or after[-1].shapes["a"] == (1, 5)


def test_batches_that_do_not_join_are_refused() -> None:
    a = randn(2, 3, 4, 5).transpose(1, 0, 2, 3)
    with pytest.raises(InputError, match=r"'a' \[3, 2, 4, 5\].*cannot be joined without a copy"):
        ops.matmul(a, randn(3, 2, 5, 6))
    out = np.zeros((3, 2, 4, 6), F32).transpose(1, 0, 2, 3)
    with pytest.raises(InputError, match=r"'out'.*cannot be joined"):
        ops.matmul(randn(2, 3, 4, 5), randn(5, 6), out=out)


VIEWS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "transposed": lambda: (randn(5, 4).T, randn(6, 5).T),
    "parts": lambda: (randn(9, 11)[2:6, 3:8], randn(5, 40)[:, 7:13]),
    "backwards": lambda: (randn(4, 5)[::-1], randn(10, 12)[::2, ::-2]),
    "repeated rows": lambda: (np.broadcast_to(randn(1, 5), (4, 5)), randn(5, 6)),
    "repeated elements": lambda: (randn(4, 5), np.broadcast_to(F32(2), (5, 6))),
    "repeated batch": lambda: (np.broadcast_to(randn(4, 5), (3, 4, 5)), randn(3, 5, 6)),
    "batch of parts": lambda: (randn(3, 8, 5)[:, :4], randn(5, 6)),
    "batch behind": lambda: (randn(4, 5, 3).transpose(2, 0, 1), randn(6, 5, 3).transpose(2, 1, 0)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_right_numbers(view: str) -> None:
    a, b = VIEWS[view]()
    check(a, b)
    wide = np.full((*np.matmul(a, b).shape[:-1], 9), np.nan, F32)
    check(a, b, out=wide[..., 2:8])
    assert np.isnan(wide[..., :2]).all()
    assert np.isnan(wide[..., 8:]).all()


# --- results ---------------------------------------------------------------------------------------------------------


def test_sums_of_16_bits_are_those_of_32() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    k = 4096
    for dtype in (np.float16, ml_dtypes.bfloat16):
        ones = np.ones((1, k), dtype)
        assert float(ops.matmul(ones, ones.T)[0, 0]) == k
        wide = ops.matmul(ones, ones.T * dtype(1.0), out_dtype="float32")
        assert (wide.dtype, wide[0, 0]) == (F32, k)


def test_scales_of_float8() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    a, b = (randn(4, 8).astype(ml_dtypes.float8_e4m3fn), randn(8, 6).astype(ml_dtypes.float8_e4m3fn))
    want = a.astype(np.float64) @ b.astype(np.float64)
    half, three = np.array([0.5], F32), np.array(3.0, F32)
    scaled = ops.matmul(a, b, scale_a=half, scale_b=three, out_dtype="float32")
    np.testing.assert_allclose(scaled, 1.5 * want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ops.matmul(a, b, scale_b=three, out_dtype="float32"), 3 * want, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match=r"'scale_a' \[2\].*must be one float32 element"):
        ops.matmul(a, b, scale_a=np.ones(2, F32))
    with pytest.raises(InputError, match=r"'scale_b' \[1\] float64.*must be one float32 element"):
        ops.matmul(a, b, scale_b=np.ones(1))


# --- refusals --------------------------------------------------------------------------------------------------------

A, B = randn(4, 5), randn(5, 6)
SQUARE = randn(6, 6)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "k": (
        lambda: ops.matmul(A, B.T),
        r"'a' \[4, 5\] float32 on cpu and 'b' \[6, 5\].*last dimension of 'a' \(5\) must be.*'b' \(6\)",
    ),
    "dtypes": (lambda: ops.matmul(A, B.astype(np.float64)), r"'b' \[5, 6\] float64.*another dtype than 'a'.*convert"),
    "bias dtype": (lambda: ops.matmul(A, B, np.zeros(6)), "'bias'.*another dtype than 'a'"),
    "bias length": (lambda: ops.matmul(A, B, randn(4)), r"'bias' \[4\].*does not fit 'b'.*needs 6 elements"),
    "bias rank": (lambda: ops.matmul(A, B, randn(1, 6)), r"'bias' \[1, 6\].*has 2 dimensions; expected \[n\]"),
    "scale": (lambda: ops.matmul(A, B, scale_a=np.ones(1, F32)), "'scale_a'.*only float8 inputs have scales"),
    "out_dtype": (lambda: ops.matmul(A, B, out_dtype="float16"), "out_dtype float16 is not possible.*leave it out"),
    "no out_dtype": (lambda: ops.matmul(A, B, out_dtype="floaty"), "out_dtype: dtype 'floaty' is not known"),
    "activation": (lambda: ops.matmul(A, B, activation="swish"), "activation 'swish' is not known"),
    "no activation": (lambda: ops.matmul(A, B, activation=3), "activation is 3; expected a name"),
    "phase": (
        lambda: ops.matmul(A, B, phase="test"),
        "phase is 'test'; expected 'infer', 'prefill', 'decode', 'train' or 'backward'",
    ),
    "out is an input": (
        lambda: ops.matmul(SQUARE, SQUARE, out=SQUARE),
        r"'out'.*shares memory with 'a', which would be overwritten while it is read",
    ),
    "out within an input": (lambda: ops.matmul(A, SQUARE[:5], out=SQUARE[2:]), "'out'.*shares memory with 'b'"),
    "out crosses an input": (lambda: ops.matmul(SQUARE[:4, :5], B, out=SQUARE.T[:4]), "'out'.*shares memory with 'a'"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_calls_name_the_argument(what: str) -> None:
    call, said = BAD[what]
    before = SQUARE.copy()
    with pytest.raises(InputError, match=said):
        call()
    np.testing.assert_array_equal(SQUARE, before)


def test_parts_of_one_buffer_do_not_share_memory() -> None:
    packed = np.zeros((8, 16), F32)
    packed[:, :5] = randn(8, 5)
    want = packed[:, :5].copy() @ B
    ops.matmul(packed[:, :5], B, out=packed[:, 10:])
    np.testing.assert_allclose(packed[:, 10:], want, rtol=1e-5, atol=1e-6)
    ops.matmul(packed[::2, :5], B, out=packed[1::2, 10:])


def test_what_no_kernel_can_do_names_every_candidate() -> None:
    with pytest.raises(UnsupportedOperationError) as caught:
        ops.matmul(A[:, ::2], B[:3], kernel="cpu.blas")
    text = str(caught.value)
    for kernel in ops.kernels("matmul"):
        assert kernel.id in text
    assert "strides of 'a'" in text
    assert "kernel=" in text


@pytest.mark.parametrize(
    ("kernel", "kind", "said"),
    [
        ("cpu.blass", UnsupportedOperationError, "cpu.blass: no such kernel is registered.*did you mean 'cpu.blas'"),
        ("cpuu", xrt.PolicyError, "'cpuu' is not a known kernel for matmul; did you mean 'cpu'"),
        ("flash_v2", xrt.PolicyError, "'flash_v2' is a kernel of attention, not of matmul"),
        ("a.b.c", xrt.PolicyError, "is not a kernel id"),
        ("cublas.cublasLt", UnsupportedOperationError, f"cublas.cublasLt: {NO_CUBLAS}"),
        ("cpu.blas@x=1", InputError, "nothing to configure.*'x=1'"),
        ("cublas@x=1", xrt.PolicyError, "gives a configuration to a family"),
        (3, xrt.PolicyError, "kernel= is 3: name a kernel"),
        (["cpu.blas", 3], xrt.PolicyError, "name a kernel, or several in a list"),
    ],
)
def test_wrong_kernels(kernel: Any, kind: type[Exception], said: str) -> None:
    for _ in range(2):  # the second time as the first: errors are not kept
        with pytest.raises(kind, match=said):
            ops.matmul(A, B, kernel=kernel)
    ops.matmul(A, B)


def test_kernels_in_order_of_preference() -> None:
    ops.matmul(A, B, kernel=["cublas", "cpu.reference", "cpu.blas"])
    assert xrt.decisions()[-1].chosen == "cpu.reference"
    ops.matmul(A, B, kernel=("cublas", "auto"))
    assert xrt.decisions()[-1].chosen == "cpu.blas"
    assert xrt.decisions()[-1].asked == ("cublas", "auto")
