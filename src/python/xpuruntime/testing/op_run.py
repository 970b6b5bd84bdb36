# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One op case, run by one kernel and compared with what is expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime import _core, ops

if TYPE_CHECKING:
    from xpuruntime.testing.op_arrays import Arrays
    from xpuruntime.testing.op_case import OpCall, OpCase

__all__ = ["compare", "run_case"]


def run_case(case: OpCase, kernel: str, arrays: Arrays, seed: int = 0, factors: Any = None) -> OpCall:
    """Run one case with one kernel, into poisoned results, and compare."""
    call = case.call(seed) if factors is None else case.call(seed, factors=factors)
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
    shapes = {name: one.values.shape for name, one in call.inputs.items()}
    # As the core keeps them: a record of each, for each wrong result, would take longer than to compute all cases.
    found = {
        f"{one['chosen']}@{one['config']}" if one["config"] else one["chosen"]
        for one in _core.Dispatcher.instance().decisions()
        if (one["op"], one["chosen"]) == (case.op, kernel.partition("@")[0])
        and all(one["shapes"].get(name, shape) == shape for name, shape in shapes.items())
    }
    return found.pop() if len(found) == 1 else kernel


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
    place = ", ".join(map(str, at))
    raise AssertionError(
        f"{where} is wrong at {int((~right).sum())} of {want.size} places; at [{place}] it is {got[at]!r}, expected "
        f"{want[at]!r} within {bound[at]:.3g}"
    )
