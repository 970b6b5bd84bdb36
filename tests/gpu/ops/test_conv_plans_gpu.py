# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Plans of cuDNN convolutions: each plan that a tuner times computes within the bounds of the op cases."""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime import KernelPolicy, ops
from xpuruntime.testing import TorchArrays
from xpuruntime.testing.op_suite import op_cases, run_case

BEST = KernelPolicy(auto_strategy="best_performance")
CASES = {case.name: case for case in op_cases()}
NAMES = [
    f"{op}/{what}/{dtype}"
    for op in ("conv", "conv_input_gradient", "conv_weight_gradient")
    for what in ("3x3", "channels-last", "groups")
    for dtype in ("float32", "float16", "bfloat16")
]


@pytest.mark.parametrize("name", NAMES)
def test_each_plan_is_right(name: str) -> None:
    """The exhaustive search runs one plan, another in each run; a wrong one among the others would stay unseen."""
    case, arrays = CASES[name], TorchArrays("cuda")
    call = case.call()
    inputs = {argument: arrays.make(one) for argument, one in call.inputs.items()}
    outputs = {
        argument: arrays.poison(call.expected[at].values.shape, call.expected[at].dtype, call.order)
        for argument, at in call.outputs.items()
    }
    getattr(ops, case.function)(**inputs, **call.options, **outputs, policy=BEST)
    decision = xrt.decisions()[-1]
    plans = {
        f"{candidate.id}@{candidate.config}"
        for candidate in decision.candidates
        if candidate.measured_us is not None and candidate.config
    }
    assert plans, decision.text
    wrong = []
    for plan in sorted(plans):
        try:
            run_case(case, plan, arrays)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {len(plans)} plans:\n" + "\n".join(wrong)
