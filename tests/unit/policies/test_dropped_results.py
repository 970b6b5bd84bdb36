# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A policy is frozen: a new one that `set`, `remove` or `replace` returns and nobody takes is warned of."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Callable


def dropped_set(policy: Any) -> None:
    policy.set("matmul", "cublas")


def dropped_remove(policy: Any) -> None:
    policy.remove("matmul")


def dropped_replace(policy: Any) -> None:
    policy.replace()


def dropped_in_a_loop(policy: Any) -> None:
    for op in ("conv", "matmul"):
        policy.set(op, "auto")


def dropped_across_lines(policy: Any) -> None:
    policy.set(
        "matmul",
        kernel=["cublas", "auto"],
    )


def assigned(policy: Any) -> Any:
    new = policy.set("matmul", "cublas")
    policy = new
    return policy.matmul


def returned(policy: Any) -> Any:
    return policy.remove("matmul")


def chained(policy: Any) -> Any:
    return policy.set("matmul", "cublas").set("conv", "auto").replace(auto_strategy="best_performance")


def handed_over(policy: Any) -> Any:
    return [policy.set("matmul", "cublas"), *(policy.set(op, "auto") for op in ("conv", "matmul"))]


def asserted(policy: Any) -> None:
    assert policy.set("matmul", "cublas").matmul == "cublas"


def compared(policy: Any) -> Any:
    return policy.remove("matmul") == policy or policy.set("matmul", "cublas") is policy


@pytest.mark.parametrize(
    "use",
    [dropped_set, dropped_remove, dropped_replace, dropped_in_a_loop, dropped_across_lines],
    ids=lambda f: f.__name__,
)
def test_a_result_that_is_thrown_away_is_warned_of_where_it_is(use: Callable[[Any], None]) -> None:
    policy = xrt.KernelPolicy(matmul="cublasLt")
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"thrown away.*Fix: policy = policy\.") as caught:
        use(policy)
    assert {one.filename for one in caught} == {__file__}
    assert policy.matmul == "cublasLt"


@pytest.mark.parametrize(
    "use", [assigned, returned, chained, handed_over, asserted, compared], ids=lambda f: f.__name__
)
def test_a_result_that_is_used_is_not(use: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(xrt.KernelPolicy(matmul="cublasLt"))


@pytest.mark.parametrize("kind", [xrt.Policy, xrt.ExecutionPolicy, xrt.KernelPolicy])
def test_replace_of_every_policy(kind: Any) -> None:
    policy = kind()
    with pytest.warns(xrt.XpuRuntimeWarning, match="thrown away"):
        policy.replace()
    assert policy.replace() == policy
