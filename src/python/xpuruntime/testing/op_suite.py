# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpSuite` and `check_kernel`: what every kernel must do, whatever it is.

For authors of kernels. Subclass `OpSuite` in a test module, name the kernel, and run pytest::

    from xpuruntime.testing import OpSuite


    class TestMyKernel(OpSuite):
        kernel = "mine.matmul"
        unsupported = {"matmul/*/float64": "it has no float64"}

What the kernel does not do is declared in `unsupported`, by patterns of case names: a case that is refused and not
declared is a failure, and so is one that is declared and works, and a pattern that no case has. What depends on the
version of a library below is declared in `may_refuse`: such a case must be right or refused, and where it is refused
the report says so. A kernel whose dropout draws other random numbers than the ops define declares that too; then its
forward shows which weights it drops (see `op_dropout`), and is compared with these.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, ClassVar

from xpuruntime import ops
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.testing.op_arrays import Arrays, NumpyArrays
from xpuruntime.testing.op_case import OpCase
from xpuruntime.testing.op_cases import op_cases
from xpuruntime.testing.op_dropout import find_factors
from xpuruntime.testing.op_run import run_case

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

__all__ = ["OpSuite", "cases_of", "check_kernel"]


def cases_of(kernel: str, arrays: Arrays) -> tuple[OpCase, ...]:
    """Return the cases of every operation that the kernel is registered for, as far as the library has such arrays."""
    known = ops.kernels()
    mine = {one.op for one in known if one.id == kernel}
    if not mine:
        raise InputError(f"there is no kernel {kernel!r}; there are {', '.join(sorted({one.id for one in known}))}")
    return tuple(case for case in op_cases() if case.op in mine and (arrays.reverses or "/backwards/" not in case.name))


def check_kernel(
    kernel: str,
    unsupported: Iterable[str] = (),
    *,
    may_refuse: Iterable[str] = (),
    other_random_numbers: bool = False,
    arrays: Arrays | None = None,
    seed: int = 0,
) -> tuple[str, ...]:
    """Run every case with one kernel."""
    library = arrays or NumpyArrays()
    never, sometimes = tuple(unsupported), tuple(may_refuse)
    cases = cases_of(kernel, library)
    problems = _idle_patterns((*never, *sometimes), cases)
    ran = []
    for case in cases:
        try:
            refused = check_case(case, kernel, library, never, sometimes, other_random_numbers, seed)
        except AssertionError as error:
            problems.append(str(error))
        else:
            if refused is None:
                ran.append(case.name)
    if problems:
        raise AssertionError(f"{kernel}: {len(problems)} of {len(cases)} cases failed\n" + "\n".join(problems))
    return tuple(ran)


def _idle_patterns(patterns: Iterable[str], cases: Iterable[OpCase]) -> list[str]:
    names = [case.name for case in cases]
    return [
        f"{pattern!r} is declared, and is no case of it" for pattern in patterns if not fnmatch.filter(names, pattern)
    ]


def _declared(case: OpCase, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(case.name, pattern)), None)


def check_case(
    case: OpCase,
    kernel: str,
    arrays: Arrays,
    unsupported: Iterable[str] = (),
    may_refuse: Iterable[str] = (),
    other_random_numbers: bool = False,
    seed: int = 0,
) -> str | None:
    """Run one case, which the kernel must refuse or compute as it is declared to; return why it refused.

    A case without any element needs no kernel and always works.
    """
    never, sometimes = _declared(case, unsupported), _declared(case, may_refuse)
    assert not (never and sometimes), f"{case.name} is declared twice, by {never!r} and by {sometimes!r}"
    try:
        factors = find_factors(case, kernel, arrays, seed) if other_random_numbers and case.dropout else None
        call = run_case(case, kernel, arrays, seed, factors)
    except UnsupportedOperationError as error:
        mine = [line.strip() for line in str(error).splitlines() if line.strip().startswith(f"{kernel}:")]
        if never is None and sometimes is None:
            raise AssertionError(f"{case.name} is refused, and that is not declared: {mine or error}") from None
        return mine[0] if mine else str(error)
    assert never is None or call.empty, f"{case.name} is declared unsupported by {never!r}, and works"
    return None


class OpSuite:
    """The conformance checks of one kernel; see the module's text."""

    kernel: ClassVar[str]
    unsupported: ClassVar[dict[str, str]] = {}
    may_refuse: ClassVar[dict[str, str]] = {}
    other_random_numbers: ClassVar[bool] = False

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
        """Right, or refused and declared so; skipped, so that the report lists it, where it need not be refused."""
        refused = check_case(
            op_case, self.kernel, self.arrays(), self.unsupported, self.may_refuse, self.other_random_numbers
        )
        why = _declared(op_case, self.may_refuse)
        if refused is not None and why is not None:
            import pytest

            pytest.skip(f"{self.kernel} declares that it may refuse {op_case.name} ({self.may_refuse[why]}): {refused}")

    def test_declarations(self) -> None:
        """Every declared pattern is a case, and has a reason; random numbers are those of some dropout."""
        declared = {**self.unsupported, **self.may_refuse}
        cases = cases_of(self.kernel, self.arrays())
        assert not _idle_patterns(declared, cases)
        assert all(declared.values())
        assert not self.other_random_numbers or any(case.dropout for case in cases)
