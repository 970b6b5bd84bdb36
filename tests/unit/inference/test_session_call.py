# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The arguments of `InferenceSession`, `plan` and `compile_model`: the policy comes second, aliases go one way."""

from __future__ import annotations

import inspect

import pytest

import xpuruntime as xrt
from xpuruntime.errors import PolicyError


@pytest.mark.parametrize("function", [xrt.InferenceSession, xrt.plan, xrt.compile_model])
def test_only_the_policy_is_taken_by_place(function):
    parameters = list(inspect.signature(function).parameters.values())
    by_place = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_place[0] == "model"
    assert by_place[-1] == "policy"
    assert len(by_place) <= 3


def test_aliases_say_the_same_as_the_policy():
    execution, kernels = xrt.ExecutionPolicy(device="cpu", engine="onnxruntime"), xrt.KernelPolicy(matmul="auto")
    stated = xrt.plan(xrt.demo_model_path(), xrt.Policy(execution=execution, kernels=kernels))
    assert xrt.plan(xrt.demo_model_path(), exec_policy=execution, kernel_policy=kernels).policy == stated.policy
    assert xrt.plan(xrt.demo_model_path(), device="cpu", backend="onnxruntime").engine == "onnxruntime"


def test_a_device_in_the_place_of_the_policy_is_told_apart():
    with pytest.raises(PolicyError, match=r"'cuda:0' is a device, not a file. Fix: device='cuda:0'"):
        xrt.plan(xrt.demo_model_path(), "cuda:0")


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'fp17'"):
        xrt.plan(xrt.demo_model_path(), fp17=True)
    with pytest.raises(TypeError, match="no argument 'fp17'"):
        xrt.InferenceSession(xrt.demo_model_path(), fp17=True)
