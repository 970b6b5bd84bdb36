# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpSuite` and `check_kernel`: what every kernel must do, whatever it is.

For authors of kernels. Subclass `OpSuite` in a test module, name the kernel, and run pytest::

    from xpuruntime.testing import OpSuite


    class TestMyKernel(OpSuite):
        kernel = "mine.matmul"
        unsupported = {"matmul/*/float64": "it has no float64"}

What the kernel does not do is declared in `unsupported`, by patterns of case names. Nothing is skipped: a case that is
refused and not declared is a failure, and so is one that is declared and works, and a pattern that no case has.
"""

from __future__ import annotations

import fnmatch
import zlib
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from xpuruntime import ops
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.testing.op_arrays import Arrays, NumpyArrays
from xpuruntime.testing.op_cases import OpCall, OpCase, op_cases

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

__all__ = ["OpSuite", "cases_of", "check_kernel", "run_case"]


def cases_of(kernel: str, arrays: Arrays) -> tuple[OpCase, ...]:
    """Return the cases of every operation that the kernel is registered for, as far as the library has such arrays.

    Raises
    ------
    InputError
        There is no such kernel; names those there are.
    """
    known = ops.kernels()
    mine = {one.op for one in known if one.id == kernel}
    if not mine:
        raise InputError(f"there is no kernel {kernel!r}; there are {', '.join(sorted({one.id for one in known}))}")
    return tuple(case for case in op_cases() if case.op in mine and (arrays.reverses or "/backwards/" not in case.name))


def run_case(case: OpCase, kernel: str, arrays: Arrays, seed: int = 0) -> OpCall:
    """Run one case with one kernel, into poisoned results, and compare.

    Raises
    ------
    UnsupportedOperationError
        The kernel refuses the case.
    AssertionError
        A result is wrong in dtype, shape or value, an input was written to, or `out` is not what is returned.
    """
    call = case.build(np.random.default_rng([seed, zlib.crc32(case.name.encode())]))
    inputs = {name: arrays.make(one) for name, one in call.inputs.items()}
    before = {name: arrays.read(array) for name, array in inputs.items()}
    outputs = {
        name: arrays.poison(call.expected[at].values.shape, call.expected[at].dtype, None if at else call.order)
        for name, at in call.outputs.items()
    }
    results = getattr(ops, case.function)(**inputs, **call.options, **outputs, kernel=kernel)
    found = [one for one in (results if isinstance(results, tuple) else (results,)) if one is not None]
    assert len(found) == len(call.expected), f"{case.name}: {len(found)} results, expected {len(call.expected)}"
    for name, at in call.outputs.items():
        assert found[at] is outputs[name], f"{case.name}: what is returned is not {name}="
    for name, array in inputs.items():
        np.testing.assert_array_equal(arrays.read(array), before[name], f"{case.name}: {name} was written to")
    for result, expected in zip(found, call.expected, strict=True):
        where = f"{case.name}: {expected.name}"
        assert arrays.dtype(result) == expected.dtype, f"{where} is {arrays.dtype(result)}, expected {expected.dtype}"
        _compare(where, arrays.read(result), expected.values, expected.bound)
    return call


def _compare(where: str, got: Any, want: Any, bound: Any) -> None:
    assert got.shape == want.shape, f"{where} has shape {got.shape}, expected {want.shape}"
    plain = np.isfinite(want)
    with np.errstate(invalid="ignore"):
        right = np.where(plain, np.abs(got - want) <= bound, (got == want) | (np.isnan(got) & np.isnan(want)))
    if right.all():
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = np.where(right, 0.0, np.where(np.isfinite(got) & plain, np.abs(got - want) / bound, np.inf))
    at = np.unravel_index(int(np.argmax(excess)), want.shape)
    place = ", ".join(map(str, at))
    raise AssertionError(
        f"{where} is wrong at {int((~right).sum())} of {want.size} places; at [{place}] it is {got[at]!r}, expected "
        f"{want[at]!r} within {bound[at]:.3g}"
    )


def check_kernel(
    kernel: str, unsupported: Iterable[str] = (), *, arrays: Arrays | None = None, seed: int = 0
) -> tuple[str, ...]:
    """Run every case with one kernel.

    Parameters
    ----------
    kernel : str
        Its id.
    unsupported : iterable of str
        Patterns of the names of the cases that it refuses, such as ``"matmul/*/float64"``.
    arrays : Arrays, optional
        Makes the arrays; default `NumpyArrays`.
    seed : int
        Of the random inputs.

    Returns
    -------
    tuple of str
        Names of the cases that ran.

    Raises
    ------
    AssertionError
        Lists every case that failed, that was refused and is not declared, or that is declared and was not refused.
    """
    library = arrays or NumpyArrays()
    patterns = tuple(unsupported)
    cases = cases_of(kernel, library)
    problems = _idle_patterns(patterns, cases)
    ran = []
    for case in cases:
        try:
            check_case(case, kernel, patterns, library, seed)
        except AssertionError as error:
            problems.append(str(error))
        else:
            ran.append(case.name)
    if problems:
        raise AssertionError(f"{kernel}: {len(problems)} of {len(cases)} cases failed\n" + "\n".join(problems))
    return tuple(ran)


def _idle_patterns(patterns: Iterable[str], cases: Iterable[OpCase]) -> list[str]:
    names = [case.name for case in cases]
    return [
        f"{pattern!r} is declared, and is no case of it" for pattern in patterns if not fnmatch.filter(names, pattern)
    ]


def check_case(case: OpCase, kernel: str, patterns: Iterable[str], arrays: Arrays, seed: int = 0) -> None:
    """Run one case, which the kernel must refuse if it is declared and must compute if not.

    A case without any element needs no kernel and always works.
    """
    declared = next((pattern for pattern in patterns if fnmatch.fnmatchcase(case.name, pattern)), None)
    try:
        call = run_case(case, kernel, arrays, seed)
    except UnsupportedOperationError as error:
        if declared is None:
            mine = [line.strip() for line in str(error).splitlines() if line.strip().startswith(f"{kernel}:")]
            raise AssertionError(f"{case.name} is refused, and that is not declared: {mine or error}") from None
        return
    assert declared is None or call.empty, f"{case.name} is declared unsupported by {declared!r}, and works"


class OpSuite:
    """The conformance checks of one kernel; see the module's text.

    Attributes
    ----------
    kernel : str
    unsupported : dict of str to str
        Pattern of case names to the reason why the kernel refuses them.
    """

    kernel: ClassVar[str]
    unsupported: ClassVar[dict[str, str]] = {}

    @classmethod
    def arrays(cls) -> Arrays:
        """Return what makes the arrays. Override for kernels that are not on the CPU."""
        return NumpyArrays()

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """One test for each case."""
        if "op_case" in metafunc.fixturenames:
            found = metafunc.cls
            cases = cases_of(found.kernel, found.arrays())
            metafunc.parametrize("op_case", cases, ids=[case.name for case in cases])

    def test_case(self, op_case: OpCase) -> None:
        """Right, or refused and declared so."""
        check_case(op_case, self.kernel, self.unsupported, self.arrays())

    def test_declarations(self) -> None:
        """Every declared pattern is a case, and has a reason."""
        assert not _idle_patterns(self.unsupported, cases_of(self.kernel, self.arrays()))
        assert all(self.unsupported.values())
