# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpSuite` and `check_kernel`: what every kernel must do, whatever it is.

For authors of kernels. Subclass `OpSuite` in a test module, name the kernel, and run pytest::

    from xpuruntime.testing import OpSuite


    class TestMyKernel(OpSuite):
        kernel = "mine.matmul"
        unsupported = {"matmul/*/float64": "it has no float64"}

Cases that the kernel refuses are declared in `unsupported`, by patterns of case names: a case that is refused and not
declared is a failure, and so is one that is declared and works, and a pattern that no case has. What depends on the
version of a library below is declared in `may_refuse`: such a case must be right or refused, and where it is refused
the report says so. A kernel whose dropout draws other random numbers than the ops define declares that too; then its
forward shows which weights it drops (see `find_factors`), and is compared with these.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from xpuruntime import _core, ops
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.testing.op_arrays import Arrays, Input, NumpyArrays, OpCall, OpCase, dropout_factors
from xpuruntime.testing.op_cases_attention import attention_cases, norm_cases
from xpuruntime.testing.op_cases_products import conv_cases, conv_gradient_cases, matmul_cases

if TYPE_CHECKING:
    import pytest


def cases_of(kernel: str, arrays: Arrays) -> tuple[OpCase, ...]:
    """Return the cases of every operation that the kernel is registered for, as far as the library has such arrays."""
    known = ops.kernels()
    mine = {row.op for row in known if row.id == kernel}
    if not mine:
        raise InputError(f"there is no kernel {kernel!r}; there are {', '.join(sorted({row.id for row in known}))}")
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
            suite = metafunc.cls
            cases = cases_of(suite.kernel, suite.arrays())
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


def run_case(case: OpCase, kernel: str, arrays: Arrays, seed: int = 0, factors: Any = None) -> OpCall:
    """Run one case with one kernel, into poisoned results, and compare."""
    call = case.call(seed) if factors is None else case.call(seed, factors=factors)
    inputs = {name: arrays.make(input_) for name, input_ in call.inputs.items()}
    before = {name: arrays.read(array) for name, array in inputs.items()}
    outputs = {
        name: arrays.poison(call.expected[at].values.shape, call.expected[at].dtype, None if at else call.order)
        for name, at in call.outputs.items()
    }
    results = getattr(ops, case.function)(**inputs, **call.options, **outputs, kernel=kernel)
    computed = [result for result in (results if isinstance(results, tuple) else (results,)) if result is not None]
    assert len(computed) == len(call.expected), f"{case.name}: {len(computed)} results, expected {len(call.expected)}"
    for name, at in call.outputs.items():
        assert computed[at] is outputs[name], f"{case.name}: what is returned is not {name}="
    for name, array in inputs.items():
        np.testing.assert_array_equal(arrays.read(array), before[name], f"{case.name}: {name} was written to")
    for result, expected in zip(computed, call.expected, strict=True):
        where = f"{case.name}: {expected.name}"
        assert arrays.dtype(result) == expected.dtype, f"{where} is {arrays.dtype(result)}, expected {expected.dtype}"
        bound = expected.bound
        if expected.fp8_sizes is not None:
            bound = bound + arrays.fp8_sums * expected.fp8_sizes
        try:
            compare(where, arrays.read(result), expected.values, bound)
        except AssertionError as error:
            raise AssertionError(f"{error}; by {_configured(case, kernel, call)}") from None
    return call


def _configured(case: OpCase, kernel: str, call: OpCall) -> str:
    """Return the kernel with the configuration that served a call, if the decision log has exactly one match."""
    shapes = {name: input_.values.shape for name, input_ in call.inputs.items()}
    # As the core keeps them: a record of each, for each wrong result, would take longer than to compute all cases.
    texts = {
        f"{decision['chosen']}@{decision['config']}" if decision["config"] else decision["chosen"]
        for decision in _core.Dispatcher.instance().decisions()
        if (decision["op"], decision["chosen"]) == (case.op, kernel.partition("@")[0])
        and all(decision["shapes"].get(name, shape) == shape for name, shape in shapes.items())
    }
    return texts.pop() if len(texts) == 1 else kernel


def compare(where: str, got: Any, want: Any, bound: Any) -> None:
    """Raise AssertionError unless all of `got` is within `bound` of `want`, or as infinite or NaN as that."""
    assert got.shape == want.shape, f"{where} has shape {got.shape}, expected {want.shape}"
    plain = np.isfinite(want)
    with np.errstate(invalid="ignore"):
        right = np.where(plain, np.abs(got - want) <= bound, (got == want) | (np.isnan(got) & np.isnan(want)))
    if right.all():
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = np.where(right, 0.0, np.where(np.isfinite(got) & plain, np.abs(got - want) / bound, np.inf))
    at = np.unravel_index(int(np.argmax(excess)), want.shape)
    position = ", ".join(map(str, at))
    raise AssertionError(
        f"{where} is wrong at {int((~right).sum())} of {want.size} places; at [{position}] it is {got[at]!r}, expected "
        f"{want[at]!r} within {bound[at]:.3g}"
    )


@functools.cache
def op_cases(op: str | None = None) -> tuple[OpCase, ...]:
    """Return the cases that every kernel has to pass, in a fixed order."""
    makers = (matmul_cases, attention_cases, norm_cases, conv_cases, conv_gradient_cases)
    return tuple(case for maker in makers for case in maker() if op in (None, case.op))


Array = np.ndarray[Any, Any]

#: Standard deviations that the number of weights kept may be away from what is expected.
_MOST_DEVIATIONS = 6


def find_factors(case: OpCase, kernel: str, arrays: Arrays, seed: int = 0) -> Array:
    """Return what multiplies each attention weight of a case with dropout: 0 or ``1 / (1 - p)``.

    Attention by values that are unit vectors gives the weights themselves, as the forward of the kernel drops and
    scales them; so a gradient that agrees with these factors drops what the forward does.
    """
    call = case.call(seed)
    assert call.weights is not None, f"{case.name} has no dropout"
    p = float(np.float32(call.options["dropout_p"]))
    seen = call.weights.values > 0
    weights = _dropped_weights(call, kernel, arrays)
    scaled = call.weights.values / (1 - p)
    kept = seen & (weights > scaled / 2)
    bound = np.where(kept, call.weights.bound / (1 - p), 0.0)
    compare(f"{case.name}: weights after dropout", weights, np.where(kept, scaled, 0.0), bound)

    count, share = int(seen.sum()), int(kept.sum())
    deviation = np.sqrt(count * p * (1 - p))
    assert abs(share - (1 - p) * count) <= _MOST_DEVIATIONS * deviation, (
        f"{case.name}: {share} of {count} weights are kept, expected {(1 - p) * count:.0f} within "
        f"{_MOST_DEVIATIONS * deviation:.0f}"
    )
    of_heads = kept.reshape(-1, *kept.shape[2:])
    assert len(np.unique(of_heads, axis=0)) == len(of_heads), f"{case.name}: two heads drop the same weights"

    again = _dropped_weights(call, kernel, arrays)
    assert np.array_equal(again, weights), f"{case.name}: the same rng gives other bits the second time"
    seeds = call.inputs["rng"].values
    for what, change in (("seed", (1, 0)), ("offset", (0, 64))):
        other = _dropped_weights(call, kernel, arrays, seeds + np.array(change))
        assert not np.array_equal(other > 0, kept), f"{case.name}: another {what} drops the same weights"
    ours = dropout_factors(p, int(seeds[0]), int(seeds[1]), (*kept.shape,)) > 0
    assert not np.array_equal(ours & seen, kept), (
        f"{case.name}: other random numbers are declared, and those of the op are drawn"
    )
    return np.where(kept, 1 / (1 - p), 0.0)


def _dropped_weights(call: OpCall, kernel: str, arrays: Arrays, rng: Array | None = None) -> Array:
    inputs = {name: call.inputs[name] for name in ("q", "k", "mask", "rng") if name in call.inputs}
    if rng is not None:
        inputs["rng"] = Input(rng, "int64")
    q, shape = call.inputs["q"], call.inputs["v"].values.shape
    operands = {name: arrays.make(input_) for name, input_ in inputs.items()}
    options = {**call.options, "return_lse": True, "kernel": kernel}
    parts = []
    for start in range(0, shape[2], shape[3]):
        units = np.broadcast_to(np.eye(shape[2], shape[3], -start), shape)
        out, _ = ops.attention(v=arrays.make(Input(units, q.dtype)), **operands, **options)
        parts.append(arrays.read(out)[..., : shape[2] - start])
    return np.concatenate(parts, -1)
