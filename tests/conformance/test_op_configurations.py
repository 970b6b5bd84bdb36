# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels with configurations: a wrong result names the one that computed it, as a kernel that replays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from xpuruntime import _core, ops
from xpuruntime.ops.plugins import KernelBackend, PythonKernel, register
from xpuruntime.testing import NumpyArrays, op_cases
from xpuruntime.testing.op_suite import run_case

ID = "testing_plans.matmul"
CASE = next(case for case in op_cases("matmul") if case.name == "matmul/primes/float32")


class Plans(PythonKernel):
    """A product whose plan of that name is wrong."""

    id = ID
    op = "matmul"
    description = "matmul for tests"
    limits = "none"
    automatic = False

    def supports(self, op: Mapping[str, Any]) -> tuple[bool, str]:
        return True, ""

    def prepare(self, op: Mapping[str, Any], config: str) -> Callable[[Mapping[str, Any], int], None]:
        plan = config or "wrong"

        def run(operands: Mapping[str, Any], stream: int) -> None:
            views = {name: tensor.numpy() for name, tensor in operands.items()}
            views["out"][...] = views["a"] @ views["b"] + (1.0 if plan == "wrong" else 0.0)

        run.config = plan  # type: ignore[attr-defined]
        return run


@pytest.fixture(autouse=True)
def _plans() -> Iterator[None]:
    register(KernelBackend("testing_plans", "cpu", "1"), Plans())
    ops.clear_decisions()
    yield
    _core.KernelRegistry.instance().remove("testing_plans")
    ops.clear_decisions()


def test_a_wrong_result_names_the_plan_that_the_kernel_chose() -> None:
    with pytest.raises(AssertionError, match=rf"is wrong at .*; by {ID}@wrong$"):
        run_case(CASE, ID, NumpyArrays())


def test_a_plan_that_is_named_is_the_one_that_runs() -> None:
    run_case(CASE, f"{ID}@right", NumpyArrays())
    with pytest.raises(AssertionError, match=rf"; by {ID}@wrong$"):
        run_case(CASE, f"{ID}@wrong", NumpyArrays())
