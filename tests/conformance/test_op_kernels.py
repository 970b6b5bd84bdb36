# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One list of op cases, every kernel that runs without a device."""

from __future__ import annotations

import numpy as np
import pytest

from xpuruntime import InputError, ops
from xpuruntime.testing import OpSuite, check_kernel, op_cases, op_suite
from xpuruntime.testing.op_arrays import Input, NumpyArrays, dropout_factors
from xpuruntime.testing.op_references import round_to
from xpuruntime.testing.op_suite import cases_of, check_case, run_case

pytest_plugins = ["pytester"]

REFUSED_BY_BLAS = {
    "matmul/*/*float16": "OpenBLAS has fp32 and fp64",
    "matmul/*/float8_e4m3fn": "OpenBLAS has fp32 and fp64",
    "matmul/columns-apart/float32": "one of two strides must be 1",
    "matmul/columns-apart/float64": "one of two strides must be 1",
    "matmul/backwards/float32": "strides must be positive",
    "matmul/backwards/float64": "strides must be positive",
    "matmul/repeated-row/float32": "rows must not overlap",
    "matmul/repeated-row/float64": "rows must not overlap",
}


class TestCpuReference(OpSuite):
    kernel = "cpu.reference"


class TestCpuBlas(OpSuite):
    kernel = "cpu.blas"
    unsupported = REFUSED_BY_BLAS


class TestCpuGemmConv(OpSuite):
    kernel = "cpu.gemm_conv"
    unsupported = {  # noqa: RUF012
        "conv*/*/*float16": "OpenBLAS has fp32 and fp64",
        "conv/channels-last/float*": "a weight in channels last is not contiguous",
        "conv/channels-last-bias-relu/float*": "a weight in channels last is not contiguous",
        "conv/channels-last-relu/float*": "a weight in channels last is not contiguous",
        "conv/channels-last-bias-silu/float*": "a weight in channels last is not contiguous",
        "conv/channels-last-bias-gelu/float*": "a weight in channels last is not contiguous",
        "conv/channels-last-odd/float*": "a weight in channels last is not contiguous",
        "conv_input_gradient/channels-last/float*": "a weight in channels last is not contiguous",
        "conv_input_gradient/channels-last-stride/float*": "a weight in channels last is not contiguous",
        "conv_input_gradient/channels-last-odd/float*": "a weight in channels last is not contiguous",
        "conv_*_gradient/rows-apart/float*": "the rows of an image must lie one behind the other",
        "conv_*_gradient/columns-apart/float*": "the pixels of a row must lie one behind the other",
    }


class TestCpuVectorised(OpSuite):
    kernel = "cpu.vectorised"
    unsupported = {  # noqa: RUF012
        "*/float64": "it computes in fp32",
        "*/columns-apart/*": "columns must lie next to each other",
        "*/transposed/*": "columns must lie next to each other",
    }


def test_names_are_unique_and_every_operation_has_cases() -> None:
    names = [case.name for case in op_cases()]
    assert len(set(names)) == len(names)
    assert len(names) > 900
    assert {case.op for case in op_cases()} == {
        "matmul", "attention", "attention_backward", "layer_norm", "layer_norm_backward", "rms_norm",
        "rms_norm_backward", "conv", "conv_input_gradient", "conv_weight_gradient",
    }  # fmt: skip
    assert all(case.name.startswith(case.op + "/") for case in op_cases())


def test_a_kernel_that_computes_nothing_fails() -> None:
    """Zeros are right only where the result is zero."""
    arrays = NumpyArrays()
    cases = list(cases_of("null.null", arrays))[::4]  # of each kind some: a failure takes longer than a success
    wrong = 0
    for case in cases:
        ops.clear_decisions()  # a wrong result looks for its configuration in all of them
        try:
            check_case(case, "null.null", arrays)
        except AssertionError as error:
            wrong += " is wrong at " in str(error)
    assert wrong > 0.9 * len(cases)


def test_every_wrong_case_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_suite, "op_cases", lambda: op_cases("conv")[:4])
    with pytest.raises(AssertionError, match=r"null\.null: 4 of 4 cases failed") as caught:
        check_kernel("null.null")
    assert str(caught.value).count(" is wrong at ") == 4


def test_declarations_are_held() -> None:
    with pytest.raises(AssertionError) as caught:
        check_kernel("cpu.blas", ["matmul/one/float32", "matmul/nothing/*"])
    text = str(caught.value)
    assert "matmul/one/float32 is declared unsupported by 'matmul/one/float32', and works" in text
    assert "'matmul/nothing/*' is declared, and is no case of it" in text
    assert "matmul/one/float16 is refused, and that is not declared" in text
    assert "cpu.blas: OpenBLAS multiplies fp32 and fp64, and this is float16" in text


def test_what_may_be_refused_is_right_or_refused() -> None:
    names = check_kernel("cpu.blas", [*REFUSED_BY_BLAS][2:], may_refuse=["matmul/*/*float16", "matmul/*/float8_e4m3fn"])
    assert "matmul/one/float32" in names
    assert not any(name.endswith(("float16", "float8_e4m3fn")) for name in names if "zero" not in name)
    with pytest.raises(AssertionError) as caught:
        check_kernel("cpu.blas", REFUSED_BY_BLAS, may_refuse=["matmul/one/float16", "matmul/nothing/*"])
    text = str(caught.value)
    assert "matmul/one/float16 is declared twice, by 'matmul/*/*float16' and by 'matmul/one/float16'" in text
    assert "'matmul/nothing/*' is declared, and is no case of it" in text
    assert "cpu.blas: 2 of " in text


def test_what_may_be_refused_and_is_wrong_fails() -> None:
    for case in op_cases("conv")[:4]:
        with pytest.raises(AssertionError, match="is wrong at"):
            check_case(case, "null.null", NumpyArrays(), may_refuse=["conv/*"])


def test_the_report_lists_what_is_refused_and_may_be(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from xpuruntime.testing import OpSuite

        class TestBlas(OpSuite):
            kernel = "cpu.blas"
            may_refuse = {"matmul/one/float16": "that depends", "matmul/one/float32": "nor does this"}
        """
    )
    result = pytester.runpytest_inprocess("-rs", "-k", "matmul/one/float", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(
        ["*cpu.blas declares that it may refuse matmul/one/float16 (that depends): cpu.blas: *"]
    )


def test_unknown_kernel() -> None:
    with pytest.raises(InputError, match=r"no kernel 'cpu\.abacus'; there are .*cpu\.blas"):
        check_kernel("cpu.abacus")


def test_other_seeds_are_other_inputs() -> None:
    case = op_cases("matmul")[0]
    first, second = (case.build(np.random.default_rng(seed)).inputs["a"].values for seed in (1, 2))
    assert not np.array_equal(first, second)
    for seed in range(5):
        run_case(case, "cpu.reference", NumpyArrays(), seed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_rounding_is_that_of_the_dtype(dtype: str) -> None:
    """Against the conversion of NumPy and ml_dtypes, also of subnormal numbers and ties."""
    arrays = NumpyArrays()
    bits = np.arange(0x10000, dtype=np.uint16) if dtype != "float8_e4m3fn" else np.arange(0x100, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        numbers = bits.view(arrays.poison((1,), dtype, None).dtype).astype(np.float64)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate([numbers, middles, np.random.default_rng(1).standard_normal(1000)])
    np.testing.assert_array_equal(round_to(values, dtype), arrays.read(arrays.make(Input(values, dtype))))


def test_layouts() -> None:
    arrays = NumpyArrays()
    values = np.arange(24.0).reshape(2, 3, 4)
    for layout, strides in (
        ({}, (48, 16, 4)),
        ({"order": (2, 0, 1)}, (12, 4, 24)),
        ({"gap": 1}, (96, 32, 8)),
        ({"pad": 2}, (72, 24, 4)),
        ({"reverse": True}, (-48, 16, 4)),
    ):
        made = arrays.make(Input(values, "float32", **layout))
        assert made.strides == strides
        np.testing.assert_array_equal(made, values)
    repeated = np.broadcast_to(values[:1], values.shape)
    assert arrays.make(Input(repeated, "float32", repeat=True)).strides == (0, 16, 4)


def test_dropout_keeps_its_share_and_scales() -> None:
    factors = dropout_factors(0.25, 2**40 + 3, 9, (2, 3, 100, 100))
    assert set(np.unique(factors)) == {0.0, 1 / 0.75}
    assert abs((factors == 0).mean() - 0.25) < 0.01
    assert not np.array_equal(factors[0, 0], factors[0, 1])
